"""`working`: says on a terminal or in a notebook what goes on, where it takes over a second."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

import attrs

from fdtensor.layouts.display import shell

__all__ = ["busy", "now", "working"]

PATIENCE = 1.0
"""How many seconds nothing is said."""

EVERY = 0.5
"""How many seconds pass from one look at what goes on to the next."""

_SAID = threading.Lock()
"""Held by what says something: within, others are silent."""


class _Screen(Protocol):
    """Where one line is shown, in place of the one before, and taken away in the end."""

    def show(self, text: str) -> None: ...

    def clear(self) -> None: ...


@attrs.define
class _Line:
    """What goes on, as a thread of its own shows it."""

    what: str
    step: str = ""
    start: float = attrs.field(factory=time.monotonic)
    over: threading.Event = attrs.field(factory=threading.Event)

    def __str__(self) -> str:
        text = f"{self.what}: {self.step}" if self.step else self.what
        return f"{text}, {time.monotonic() - self.start:.0f} s"

    def shown(self, screen: Callable[[], _Screen]) -> None:
        """Shows it from the second second on until it is over."""
        if self.over.wait(PATIENCE):
            return
        place = screen()
        try:
            place.show(str(self))
            while not self.over.wait(EVERY):
                place.show(str(self))
        finally:
            place.clear()


_lines: list[_Line] = []
"""The line that is shown; none where nobody watches."""


@contextlib.contextmanager
def working(what: str) -> Generator[None]:
    """Shows `what`, and for how long, from the second second on: where somebody watches, once."""
    screen = _screen()
    if screen is None or not _SAID.acquire(blocking=False):
        yield
        return
    line = _Line(what)
    thread = threading.Thread(target=line.shown, args=(screen,), daemon=True)
    thread.start()
    _lines.append(line)
    try:
        yield
    finally:
        _lines.remove(line)
        line.over.set()
        thread.join()
        _SAID.release()


def now(step: str) -> None:
    """Says which step of what goes on comes now, if it is shown."""
    for line in _lines:
        line.step = step


@contextlib.contextmanager
def busy() -> Generator[None]:
    """Keeps `working` silent, for what shows progress by other means."""
    mine = _SAID.acquire(blocking=False)
    try:
        yield
    finally:
        if mine:
            _SAID.release()


def _screen() -> Callable[[], _Screen] | None:
    """Where somebody watches: the terminal of rank 0, or a notebook that is not run as a file."""
    if os.environ.get("RANK", "0") != "0":
        return None
    if sys.stderr is not None and sys.stderr.isatty():
        return _Terminal
    kernel = getattr(shell(), "kernel", None)
    return _Cell if getattr(kernel, "_allow_stdin", False) else None


class _Terminal:
    """A spinner and a line on stderr."""

    def __init__(self) -> None:
        from rich.console import Console

        self.status = Console(stderr=True).status("")
        self.status.start()

    def show(self, text: str) -> None:
        self.status.update(text)

    def clear(self) -> None:
        self.status.stop()


class _Cell:
    """An output of the cell that runs."""

    def __init__(self) -> None:
        display: Any = sys.modules["IPython"].display.display
        self.handle = display({"text/plain": ""}, raw=True, display_id=True)

    def show(self, text: str) -> None:
        self.handle.update({"text/plain": text}, raw=True)

    def clear(self) -> None:
        self.handle.update({}, raw=True)
