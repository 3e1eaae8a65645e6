"""`planning`: a block in which this library plans: chooses layouts, and writes a program down."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from threading import get_ident

__all__ = ["is_planning", "planning"]

_threads: set[int] = set()
"""The threads that plan, of which a process seldom has two."""


@contextmanager
def planning() -> Generator[None]:
    """A block of this thread in which no code of the user runs, only work on many small records.

    Other ranks wait for it as long as it takes. Python does not search for garbage meanwhile: each
    full collection walks all objects of the process, and what is planned is hardly ever garbage.
    """
    thread = get_ident()
    if thread in _threads:
        yield
        return
    collects = gc.isenabled()
    _threads.add(thread)
    gc.disable()
    try:
        yield
    finally:
        _threads.discard(thread)
        if collects:
            gc.enable()


def is_planning() -> bool:
    """Whether a thread of this process plans."""
    return bool(_threads)
