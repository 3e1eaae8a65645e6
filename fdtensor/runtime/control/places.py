"""The lines of the user that are running: which one calls, and where another thread is."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import CodeType, FrameType

__all__ = ["Place", "caller", "line_of", "raised_at", "running"]

_OURS = f"{Path(__file__).parents[2]}{os.sep}"
_TORCH = f"{os.sep}torch{os.sep}"

_WITH = contextlib.__file__
"""What runs where a block of `with` ends."""

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


def raised_at(error: BaseException) -> str:
    """Where the user's code raised an error, or called what did; empty for nowhere in it."""
    line, at = "", error.__traceback__
    while at is not None:
        if _is_of_user(at.tb_frame.f_code):
            line = _text(at.tb_frame.f_code, at.tb_lineno)
        at = at.tb_next
    return line


def _of_user(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not _is_of_user(frame.f_code):
        frame = frame.f_back
    return frame


def _is_of_user(code: CodeType) -> bool:
    file = code.co_filename
    return not file.startswith((_OURS, "<")) and file != _WITH and _TORCH not in file


def _text(code: CodeType, line: int) -> str:
    name = "" if code.co_name == "<module>" else f" in {code.co_name}"
    return f"{os.path.basename(code.co_filename)}:{line}{name}"
