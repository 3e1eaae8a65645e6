"""`refuse_random`: refuses ops that would draw other random numbers on each rank."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.torch_private import schema_of, without_modes

__all__ = ["is_quiet", "refuse_numbers", "refuse_random"]

aten = torch.ops.aten

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


_BY_NUMBERS = {
    aten.bernoulli.p,
    aten.cauchy.default,
    aten.exponential.default,
    aten.geometric.default,
    aten.log_normal.default,
    aten.multinomial.default,
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.float_float,
    aten.normal_functional.default,
    aten.randint.default,
    aten.randint.low,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.random.to,
    getattr(aten.random, "from"),
    aten.uniform.default,
}
"""Ops whose kernels check numbers of Python, as the ends of a range, or dtypes and sizes."""


def refuse_numbers(func: Any, args: Any, in_place: Any = None) -> None:
    """Raises as torch does for numbers that an op, or the one in place, cannot draw by.

    It draws nothing: the op runs on operands without elements.
    """
    if func not in _BY_NUMBERS or not all(map(_is_known, args)):
        return
    with without_modes(), contextlib.suppress(NotImplementedError):  # of a dtype, told elsewhere
        (in_place or func)(*map(_of_nothing, args))


def _is_known(argument: Any) -> bool:
    """Whether a number, or the last size of a tensor, is one that is known."""
    last = argument.shape[-1:] if isinstance(argument, torch.Tensor) else (argument,)
    return not any(isinstance(n, (torch.SymInt, torch.SymFloat)) for n in last)


def _of_nothing(argument: Any) -> Any:
    """An operand without rows, or the size of such a result; numbers as they are."""
    if isinstance(argument, torch.Tensor):
        return torch.empty((0, *(argument.shape[-1:] or (1,))), dtype=argument.dtype)
    return [0] if isinstance(argument, (list, tuple)) else argument
