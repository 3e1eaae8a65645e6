"""Properties of dtypes: the least and greatest value, and which casts keep sums or the order."""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from fdtensor.ops.graph import Full
from fdtensor.ops.notation.ops import tensors

__all__ = ["alike", "highest", "keeps_order", "keeps_sums", "linear_in", "lowest", "numeric"]


def lowest(dtype: torch.dtype) -> float | int | bool:
    """The least value of a dtype: the maximum over no elements."""
    if dtype.is_floating_point or dtype.is_complex:  # torch refuses to order what is complex
        return -inf
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float | int | bool:
    """The greatest value of a dtype: the minimum over no elements."""
    if dtype.is_floating_point or dtype.is_complex:
        return inf
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def numeric(*args: Any) -> bool:
    """Whether all tensors among the arguments are of dtypes with a sign."""
    return all(t.dtype.is_signed for t in tensors(args))


def alike(*args: Any) -> bool:
    """Whether the tensors among the arguments have one dtype, or dtypes with a sign."""
    return len({t.dtype for t in tensors(args)}) == 1 or numeric(*args)


def keeps_sums(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a cast of a sum is, without rounding each term, the sum of the casts.

    Sums of integers wrap around, as narrower ones do too; wider ones and floats do not.
    """
    if before == after:
        return True
    if before is torch.bool or after is torch.bool or before.is_complex > after.is_complex:
        return False
    floats = after.is_floating_point or after.is_complex
    if not (before.is_floating_point or before.is_complex):
        return not floats and after.itemsize <= before.itemsize
    halves = before.is_complex < after.is_complex
    return floats and after.itemsize // (2 if halves else 1) >= before.itemsize


def linear_in(x: Full, dtype: torch.dtype | None) -> bool:
    """Whether a sum may stay pending through a cast to `dtype`: a sum of bools is their or."""
    if x.dtype == torch.bool:
        return False
    return dtype is None or dtype.is_floating_point or dtype.is_complex or dtype == x.dtype


def keeps_order(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a cast keeps the order: `a <= b` stays so."""
    if before == after or before.is_complex or after.is_complex:
        return before == after and not before.is_complex
    if after.is_floating_point or before is torch.bool:
        return True
    wider = after.itemsize > before.itemsize and after is not torch.bool
    return wider and not before.is_floating_point and after.is_signed
