"""`choose_interface` and `unreachable`: by which network interface ranks of several machines talk.

gloo takes the address to which the host name resolves, and the loopback where that is none of the
machine's: ranks of several machines then do not reach each other, or reach a wrong one, and wait.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["choose_interface", "interface_to", "own_place", "unreachable"]

GLOO = "GLOO_SOCKET_IFNAME"

_SIOCGIFADDR = 0x8915
"""The request for the IPv4 address of an interface, in Linux."""


def choose_interface(host: str) -> str | None:
    """Lets gloo use the interface that leads to `host`, where it would use the loopback.

    Gives its name; None where the environment names one already, or nothing is to be changed.
    """
    if os.environ.get(GLOO) or not _is_loopback(_listening()):
        return None
    name = interface_to(host)
    if name is not None:
        os.environ[GLOO] = name
    return name


def own_place() -> str:
    """The machine of this process and where gloo listens on it, for `unreachable`."""
    try:  # a container may have a network of its own, or share that of its host
        with open("/proc/sys/kernel/random/boot_id") as boot:
            machine = f"{boot.read().strip()}.{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        machine = socket.gethostname()
    return f"{machine} {_listening() or 'the loopback'}"


def unreachable(places: Sequence[str]) -> list[int]:
    """The ranks, of all with these places, that others on other machines do not reach."""
    split = [text.partition(" ") for text in places]
    if len({machine for machine, _, _ in split}) < 2:
        return []
    return [rank for rank, (_, _, address) in enumerate(split) if _is_loopback(address)]


def _listening() -> str | None:
    """The address at which gloo listens; None where that is the loopback for want of another."""
    named = os.environ.get(GLOO)
    if named:
        each = [next(iter(_addresses(name)), None) for name in named.split(",")]
        return next(filter(_is_loopback, each), each[0])  # gloo listens on all of them
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
        return address
    return None


def interface_to(host: str) -> str | None:
    """The name of the interface by which this machine reaches a host; None for the loopback.

    None too where the system does not tell.
    """
    with suppress(OSError):
        (family, *_, target), *_ = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: it only looks up the route
            address = probe.getsockname()[0]
        if not _is_loopback(address):
            return next((n for _, n in socket.if_nameindex() if address in _addresses(n)), None)
    return None


def _is_loopback(address: str | None) -> bool:
    """Whether an address leads to this machine alone; what is no address does too."""
    with suppress(ValueError):
        return ipaddress.ip_address((address or "").partition("%")[0]).is_loopback
    return True


def _addresses(name: str) -> list[str]:
    """The addresses of an interface, where Linux tells."""
    addresses: list[str] = []
    with suppress(OSError, ImportError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        addresses.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError), open("/proc/net/if_inet6") as table:
        lines = (line.split() for line in table)
        bare = (line[0] for line in lines if line[-1] == name)
        addresses += [str(ipaddress.ip_address(int(digits, 16))) for digits in bare]
    return addresses
