"""`rounded`, `above` and `below`: Python floats as those of a dtype, without a tensor to trace."""

from __future__ import annotations

from math import frexp, inf, isinf, ldexp

import torch

__all__ = ["MANTISSA", "above", "below", "least", "rounded"]

MANTISSA = {torch.float32: 23, torch.float64: 52, torch.float16: 10, torch.bfloat16: 7}
"""The bits that are stored of each mantissa."""


def rounded(x: float, dtype: torch.dtype) -> float:
    """The nearest number of the dtype; of two as near, the even one."""
    if isinf(x):
        return x
    step = _step(x, dtype)
    nearest = ldexp(round(ldexp(x, -step)), step)
    return nearest if abs(nearest) <= torch.finfo(dtype).max else inf if x > 0 else -inf


def above(x: float, dtype: torch.dtype) -> float:
    """The next number of the dtype."""
    if isinf(x):
        return inf if x > 0 else -torch.finfo(dtype).max
    step = _step(x, dtype)
    if x < 0 and frexp(x)[0] == -0.5:  # numbers nearer to zero are closer
        step = max(step - 1, least(dtype))
    following = x + ldexp(1.0, step)
    return following if following <= torch.finfo(dtype).max else inf


def below(x: float, dtype: torch.dtype) -> float:
    """The number of the dtype before this one."""
    return -above(-x, dtype)


def _step(x: float, dtype: torch.dtype) -> int:
    """The exponent of the distance between numbers of the dtype at `x`."""
    smallest = least(dtype)
    return max(frexp(x)[1] - 1 - MANTISSA[dtype], smallest) if x else smallest


def least(dtype: torch.dtype) -> int:
    """The exponent of the smallest positive number of the dtype."""
    return frexp(torch.finfo(dtype).tiny)[1] - 1 - MANTISSA[dtype]
