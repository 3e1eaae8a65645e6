"""The lines of the user that are running: which one calls, and where another thread is."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType

__all__ = ["Place", "caller", "line_of", "running"]

_OURS = f"{Path(__file__).parents[2]}{os.sep}"
_TORCH = f"{os.sep}torch{os.sep}"

Place = tuple[CodeType, int]
"""A function and how far it has come: which line that is, is worked out when it is asked for."""


def caller() -> Place | None:
    """Where the user's code calls this library."""
    frame = _of_user(sys._getframe(1))
    return None if frame is None else (frame.f_code, frame.f_lasti)


def line_of(place: Place | None) -> str:
    """A place as `train.py:44 in step`; empty for none."""
    if place is None:
        return ""
    code, offset = place
    line = next((n for start, stop, n in code.co_lines() if start <= offset < stop and n), None)
    return _text(code, line or code.co_firstlineno)


def running(thread: int) -> str:
    """Where the user's code is in a thread, as `train.py:44 in step`; empty where it is in none."""
    frame = _of_user(sys._current_frames().get(thread))
    return "" if frame is None else _text(frame.f_code, frame.f_lineno)


def _of_user(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, "<")) and _TORCH not in file:
            return frame
        frame = frame.f_back
    return None


def _text(code: CodeType, line: int) -> str:
    name = "" if code.co_name == "<module>" else f" in {code.co_name}"
    return f"{os.path.basename(code.co_filename)}:{line}{name}"
