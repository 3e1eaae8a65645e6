"""`refuse_random`: no op may draw random numbers of its own, other ones on each rank."""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.layouts.errors import TraceError

__all__ = ["is_quiet", "refuse_random"]

_QUIET = {"dropout_p": 0, "dropout": 0, "p": 0, "train": False, "training": False}
"""With which values of their arguments random ops draw nothing."""


def refuse_random(func: Any, args: Any) -> None:
    """Raises `TraceError` for a call of an op that draws random numbers."""
    if torch.Tag.nondeterministic_seeded in func.tags and not is_quiet(func, args):
        raise TraceError(
            f"{func} draws random numbers, and nothing is known that draws them from a key.",
            hint="Pass the numbers in as an argument, or switch dropout off with eval().",
        )


def is_quiet(func: Any, args: Any) -> bool:
    """Whether a call of an op that may draw random numbers draws none: a dropout of 0."""
    names = [a.name for a in func._schema.arguments]
    for name, quiet in _QUIET.items():
        if name in names:
            place = names.index(name)
            given = (
                args[place] if place < len(args) else func._schema.arguments[place].default_value
            )
            if isinstance(given, (int, float)) and given == quiet:
                return name != "p" or "train" in names  # others are told what to keep, or to count
    return False
