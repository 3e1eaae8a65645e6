"""Elementwise functions that keep or reverse order: maxima and minima may stay pending.

Only functions that are defined on all numbers: of `log`, a term that is not the largest may be nan.
Arithmetic counts for floats only, since integers wrap around.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch

from fdtensor.layouts.placement import Partial
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import MAX, MIN, R
from fdtensor.ops.notation.ops import on, tensors
from fdtensor.ops.rules.pointwise import broadcast


def ordered(slope: float, *others: Any):
    """The rows of a function that rises in its first argument, or falls for a slope below 0."""
    beside = [R] * len(tensors(others))
    if slope:
        yield (MAX, *beside), MAX if slope > 0 else MIN
        yield (MIN, *beside), MIN if slope > 0 else MAX


def shifted(x: Full, number: Any, slope: Any = 1):
    """The rows with maxima and minima of `slope * x + number`."""
    for value in (number, slope):
        if isinstance(value, complex) or not isfinite(value):
            return
    if x.dtype.is_floating_point:
        yield from ordered(slope)


INCREASING = """
asinh atan ceil erf exp exp2 expm1 floor hardsigmoid hardtanh relu relu6 round selu sigmoid sinh
tanh trunc
"""


@on(INCREASING)
def increasing(x, *_):
    """`out[i] = f(x[i])` with `f(a) <= f(b)` where `a <= b`"""
    yield from broadcast([x])
    if not x.dtype.is_complex:
        yield from ordered(1)


@on("leaky_relu elu celu")
def sloped(x, *numbers):
    """`out[i] = f(x[i])` with `f(a) <= f(b)` where `a <= b`, for slopes above 0"""
    yield from broadcast([x])
    if all(n > 0 for n in numbers):
        yield from ordered(1)


@on("erfc")
def decreasing(x):
    """`out[i] = f(x[i])` with `f(a) >= f(b)` where `a <= b`"""
    yield from broadcast([x])
    yield from ordered(-1)


@on("clamp clamp.Tensor clamp_min clamp_min.Tensor clamp_max clamp_max.Tensor")
def clamp(x, *bounds, **named):
    """`out[i] = min(max(x[i], least[i]), most[i])`"""
    others = (*bounds, *named.values())
    yield from broadcast(tensors((x, *others)))
    yield from ordered(1, *others)


def _extreme(pending: Partial, names: str) -> None:
    @on(names)
    def rows(a, b):
        """`out[i] = max(a[i], b[i])`, or `min`"""
        yield from broadcast([a, b])
        yield (pending, pending), pending
        for kind in (MAX, MIN):
            yield (kind, R), kind
            yield (R, kind), kind


def _logical(pending: Partial, names: str) -> None:
    @on(names)
    def rows(a, b):
        """`out[i] = a[i] or b[i]`, or `and`: of bools the greatest and the least"""
        yield from broadcast(tensors((a, b)))
        if isinstance(b, Full) and a.dtype is b.dtype is torch.bool:
            yield (pending, pending), pending


_extreme(MAX, "maximum max.other")
_extreme(MIN, "minimum min.other")
_logical(MAX, "logical_or bitwise_or.Tensor")
_logical(MIN, "logical_and bitwise_and.Tensor")


@on("logical_not bitwise_not")
def negation(x):
    """`out[i] = not x[i]`"""
    yield from broadcast([x])
    if x.dtype is torch.bool:
        yield from ordered(-1)
