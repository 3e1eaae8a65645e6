"""`working`: says on a terminal what goes on, where it takes more than a second."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status

__all__ = ["busy", "working"]

PATIENCE = 1.0
"""How many seconds nothing is said."""

_SAID = threading.Lock()
"""Held by who says something: within, others are silent."""


@contextlib.contextmanager
def working(what: str) -> Generator[None]:
    """Shows `what`, with a spinner, from the second second on: on a terminal, by rank 0, once."""
    if not _watched() or not _SAID.acquire(blocking=False):
        yield
        return
    spinner = _Spinner(what)
    timer = threading.Timer(PATIENCE, spinner.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        spinner.stop()
        _SAID.release()


@contextlib.contextmanager
def busy() -> Generator[None]:
    """Keeps `working` silent, for who shows progress by other means."""
    mine = _SAID.acquire(blocking=False)
    try:
        yield
    finally:
        if mine:
            _SAID.release()


class _Spinner:
    """A status line that is started by one thread and stopped by another, in any order."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.lock = threading.Lock()
        self.over = False
        self.status: Status | None = None

    def start(self) -> None:
        from rich.console import Console

        with self.lock:
            if not self.over:
                self.status = Console(stderr=True).status(self.what)
                self.status.start()

    def stop(self) -> None:
        with self.lock:
            self.over = True
            if self.status is not None:
                self.status.stop()


def _watched() -> bool:
    first = os.environ.get("RANK", "0") == "0"
    return first and sys.stderr is not None and sys.stderr.isatty()
