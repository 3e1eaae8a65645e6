"""The sockets of process groups and stores: which ports they listen on, and how waits on them end.

gloo offers no way to end a wait of another thread. It does end, with an error, where a connection
of its pair is shut down.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress

__all__ = ["limit_silence", "listening_ports", "shut"]


def listening_ports() -> frozenset[int]:
    """The TCP ports that this process listens on."""
    ports = set()
    for connection in _sockets():
        with suppress(OSError):
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(connection.getsockname()[1])
    return frozenset(ports)


def shut(own: Collection[int], others: Collection[int]) -> int:
    """Shuts down the connections that came in at a port of `own` or went out to one of `others`.

    Returns how many there were. Waits on them raise.
    """
    count = 0
    for connection in _sockets():
        with suppress(OSError):
            to = connection.getpeername()[1]  # raises for a socket that listens
            if connection.getsockname()[1] in own or to in others:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def limit_silence(port: int, seconds: float) -> None:
    """Ends connections to a port on which nothing comes back for so long: where a cable is cut.

    Else a wait for an answer to what was sent has no end. Linux has such a thing.
    """
    patience = max(1, round(seconds / 3))
    options = {"TCP_USER_TIMEOUT": round(seconds * 1000), "TCP_KEEPIDLE": patience}
    options |= {"TCP_KEEPINTVL": patience, "TCP_KEEPCNT": 2}
    for connection in _sockets():
        with suppress(OSError):
            if connection.getpeername()[1] == port:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in options.items():
                    if hasattr(socket, name):
                        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _sockets() -> Iterator[socket.socket]:
    """The internet sockets of this process, each as a duplicate that ends with its turn."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                    yield duplicate
