"""`nothing_runs`: a context in which nothing is executed, sent or written."""

from __future__ import annotations

import contextlib
import functools
import resource
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["nothing_runs"]

FORBIDDEN = (
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "subprocess.", "socket."),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "shutil.", "pickle.find_class"),
    *("ctypes.dlopen", "urllib.", "ftplib.", "webbrowser."),
)
"""How the names of events begin that no reading of a text has."""

MOST_BYTES = 512 << 20
"""What may be allocated beside what is allocated already."""

_watched: list[list[str]] = []


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if not _watched:
        return
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if writes or event.startswith(FORBIDDEN):
        _watched[-1].append(f"{event} {args[:2]}")


@functools.cache
def _start() -> None:
    """Lets `_hear` hear, once: a hook cannot be taken away."""
    sys.addaudithook(_hear)


@contextlib.contextmanager
def nothing_runs() -> Iterator[None]:
    """Fails at its end where something ran, or where memory grew by more than `MOST_BYTES`."""
    _start()
    _watched.append([])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    finally:
        events = _watched.pop()
    assert events == []
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES
