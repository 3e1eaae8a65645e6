"""The file by which the ranks of a cluster meet, in a directory that only its owner can enter.

It takes no port: what listens on one, on the loopback too, answers whoever is on this machine.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from torch.distributed import FileStore  # type: ignore[attr-defined]

__all__ = ["meeting_place", "remove", "store_in"]


def meeting_place(places: list[str]) -> str:
    """A new directory for the store of a cluster, which is added to `places`."""
    place = tempfile.mkdtemp(prefix="fdtensor-cluster-")
    places.append(place)
    Path(place, "store").touch(mode=0o600)
    return place


def store_in(place: str) -> FileStore:
    """The store of the ranks that meet in a directory."""
    return FileStore(str(Path(place, "store")))


def remove(places: list[str], owner: int) -> None:
    """Removes the directories, if `owner` is this process and not the one it was forked from."""
    if os.getpid() != owner:
        return
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    places.clear()
