"""`refuse_random`: refuses ops that would draw other random numbers on each rank."""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.torch_private import schema_of

__all__ = ["is_quiet", "refuse_random"]

_QUIET = {"dropout_p": 0, "dropout": 0, "p": 0, "train": False, "training": False}
"""The values of arguments with which random ops draw no numbers."""


def refuse_random(func: Any, args: Any) -> None:
    """Raises `TraceError` for a call of an op that draws random numbers."""
    if torch.Tag.nondeterministic_seeded in func.tags and not is_quiet(func, args):
        raise TraceError(
            f"{func} draws random numbers, and nothing is known that draws them from a key.",
            hint="Pass the numbers in as an argument, or switch dropout off with eval().",
        )


def is_quiet(func: Any, args: Any) -> bool:
    """Whether a call of an op that may draw random numbers draws none: a dropout of 0."""
    names = [a.name for a in schema_of(func).arguments]
    for name, quiet in _QUIET.items():
        if name in names:
            place = names.index(name)
            value = (
                args[place] if place < len(args) else schema_of(func).arguments[place].default_value
            )
            if isinstance(value, (int, float)) and value == quiet:
                return name != "p" or "train" in names  # of other ops `p` is not that of dropping
    return False
