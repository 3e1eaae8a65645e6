"""`note_part`: parts of tensors that torch has as views, and a recorded function as copies.

They are at places whose numbers are not known. Writes to them would be lost, and writes to the
whole do not reach them: both are refused, the second where the part is read again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import TraceError
from fdtensor.ops.overlap import memory_of

__all__ = ["is_part", "note_part", "note_view", "refuse_old", "refuse_written", "whole_written"]

_WHOLE = "_fdtensor_part_of"
"""The attribute of a part with the memory of its whole."""

_PARTS: list[weakref.ref[torch.Tensor]] = []
"""Those that are alive, of the functions that are recorded now."""

_OLD: list[weakref.ref[torch.Tensor]] = []
"""Those of which the whole was written to."""


def is_part(t: torch.Tensor) -> bool:
    """Whether a tensor is such a part, or a view of one."""
    return hasattr(t, _WHOLE)


def note_part(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part, known as one from now on."""
    _note(part, memory_of(whole))
    return part


def note_view(view: torch.Tensor, part: torch.Tensor) -> None:
    """Makes a view of a part known as one."""
    _note(view, getattr(part, _WHOLE))


def _note(part: torch.Tensor, whole: Any) -> None:
    setattr(part, _WHOLE, whole)
    for known in (_PARTS, _OLD):
        known[:] = [ref for ref in known if ref() is not None]
    _PARTS.append(weakref.ref(part))


def whole_written(targets: Iterable[torch.Tensor]) -> None:
    """Makes the parts of tensors that are written to old."""
    if not _PARTS:
        return
    memories = [memory_of(t) for t in targets]
    for ref in _PARTS:
        whole = getattr(ref(), _WHOLE, None)
        if any(m is None or whole is None or m.storage == whole.storage for m in memories):
            _OLD.append(ref)


def refuse_old(tensors: Iterable[torch.Tensor]) -> None:
    """Raises `TraceError` where a part is read whose whole was written to since."""
    if not _OLD:
        return
    old = {id(part) for ref in _OLD if (part := ref()) is not None}
    if any(id(t) in old for t in tensors):
        raise TraceError(
            "a part of a tensor, at a place that a tensor says, is read after the tensor was "
            "written to, and would be what it was before.",
            line=user_line() or "not known",
            hint="Take x[j] again after the write, or a clone() of it before.",
        )


def refuse_written(name: str, target: torch.Tensor) -> None:
    """Raises `TraceError` for a write to a part."""
    if is_part(target):
        raise TraceError(
            f"{name} writes to a part of a tensor at a place that a tensor says: the part is a "
            "copy, and the tensor would stay as it is.",
            line=user_line() or "not known",
            hint="Write to the tensor: x[j] = x[j] + 1.",
        )
