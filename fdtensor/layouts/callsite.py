"""`user_line`: where in the user's own code something was called, for errors."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sysconfig
import warnings
from types import FrameType

import optree
import torch

__all__ = ["is_own", "torch_line", "user_line", "user_line_of", "user_place", "warn_user"]


def _folder(file: str | None) -> str:
    return os.path.dirname(os.path.abspath(file or "")) + os.sep


_OWN = (
    *map(_folder, (os.path.dirname(os.path.abspath(__file__)), torch.__file__, optree.__file__)),
    *("<fdtensor ", "<frozen ", "<attrs generated ", "<eval_with_key>"),
)
"""How the names of files begin whose lines nobody has to mend."""

_TORCH = _folder(torch.__file__)
_CALLS = os.path.join("nn", "modules", "module.py")
"""The file of torch in which each module calls its forward."""

_CELL = os.sep + "ipykernel_"
"""A part of the name of the file that a cell of a notebook is for Python."""

_PYTHON = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)


def user_line() -> str | None:
    """The innermost line of the stack that is not of fdtensor, torch or Python: `f.py:4: x[0]`."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if _is_user(frame.f_code.co_filename):
            return _text(frame, frame.f_lineno)
        frame = frame.f_back
    return None


def user_place() -> str | None:
    """The file and number of that line: `f.py:4`, the same wherever the file lies."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_user(file):
            return f"{'cell' if _CELL in file else os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def user_line_of(error: BaseException) -> str | None:
    """The innermost such line of where an error was raised."""
    line, step = None, error.__traceback__
    while step is not None:
        if _is_user(step.tb_frame.f_code.co_filename):
            line = _text(step.tb_frame, step.tb_lineno)
        step = step.tb_next
    return line


def warn_user(text: str, kind: type[Warning]) -> None:
    """A warning that points at that line, however deep below it is said."""
    frame: FrameType | None = inspect.currentframe()
    level = 1
    while (frame := frame and frame.f_back) and not _is_user(frame.f_code.co_filename):
        level += 1
    warnings.warn(text, kind, stacklevel=level + 1)


def torch_line() -> str | None:
    """The innermost line of torch's public Python that the user's line calls: `torch/f.py:4: x[0]`.

    None where the user's line is at work by itself, or a module only calls its forward.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and not _is_user(file := frame.f_code.co_filename):
        inner = file[len(_TORCH) :] if file.startswith(_TORCH) else "_"
        if not inner.startswith("_") and f"{os.sep}_" not in inner and inner != _CALLS:
            code = linecache.getline(file, frame.f_lineno, frame.f_globals).strip()
            return f"torch/{inner.replace(os.sep, '/')}:{frame.f_lineno}: {code}"
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def _is_user(file: str) -> bool:
    if file.startswith(_OWN):
        return False
    return not file.startswith(_PYTHON) or any(part in file for part in _PACKAGES)


def is_own(file: str) -> bool:
    """Whether the code in a file is the user's own, not of Python or of an installed package."""
    return _is_user(file) and not any(part in file for part in _PACKAGES)


def _text(frame: FrameType, number: int) -> str:
    file = frame.f_code.co_filename
    code = linecache.getline(file, number, frame.f_globals).strip()
    near = os.path.relpath(file) if os.path.isabs(file) else file
    if _CELL in file:  # a name that says nothing, and another one each time
        near = "cell"
    place = f"{min(near, file, key=len)}:{number}"
    return f"{place}: {code}" if code else place
