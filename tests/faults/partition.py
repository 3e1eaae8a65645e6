"""Two hosts on this machine, as network namespaces of Linux, and the cable between them."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

__all__ = ["ADDRESS", "CABLE", "Hosts", "cut", "enter", "possible", "two_hosts"]

CABLE, ADDRESS = "fd0", "10.77.0.1"
"""The name of the interface on both hosts, and the address of the first one."""

_NEW_NETWORK = 0x40000000


@attrs.frozen
class Hosts:
    """The namespaces of two hosts; ranks 0 and 1 are on the first."""

    first: str
    second: str

    def of(self, rank: int) -> str:
        """The host of a rank."""
        return self.first if rank < 2 else self.second


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two hosts with a cable between them, until the end."""
    hosts = Hosts(f"fdtensor-{os.getpid()}-a", f"fdtensor-{os.getpid()}-b")
    names = attrs.astuple(hosts)
    try:
        for name in names:
            _ip("netns", "add", name)
        peer = ("peer", "name", CABLE, "netns", hosts.second)
        _ip("link", "add", CABLE, "netns", hosts.first, "type", "veth", *peer)
        for number, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", CABLE)
            _ip("-n", name, "link", "set", CABLE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def possible() -> bool:
    """Whether this machine lets this user have hosts."""
    try:
        with two_hosts():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def enter(host: str) -> None:
    """Makes this process, which has no socket yet, one of a host."""
    with open(f"/run/netns/{host}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {host}")


def cut() -> None:
    """Pulls the cable out of the host of this process."""
    _ip("link", "set", CABLE, "down")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
