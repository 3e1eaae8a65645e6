"""Elementwise functions that keep or turn the order of numbers: pending maxima and minima pass.

Only functions that are defined on all numbers: of `log` a term that is not the largest may be nan.
Arithmetic counts for floats only, since integers wrap around.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch

from fdtensor.graph import Full
from fdtensor.placement import Partial
from fdtensor.rules.core import R, rule
from fdtensor.rules.pointwise import broadcast, tensors

aten = torch.ops.aten

MAX, MIN = Partial("max"), Partial("min")


def kept(*others: Any):
    """The rows of a function that is increasing in its first argument."""
    beside = [R] * len(tensors(others))
    for pending in (MAX, MIN):
        yield (pending, *beside), pending


def turned(*others: Any):
    """The rows of a function that is decreasing in its first argument."""
    beside = [R] * len(tensors(others))
    yield (MAX, *beside), MIN
    yield (MIN, *beside), MAX


def shifted(x: Full, number: Any):
    """The rows with maxima and minima of `x + number`."""
    if x.dtype.is_floating_point and not isinstance(number, complex) and isfinite(number):
        yield from kept()


def stretched(x: Full, number: Any):
    """The rows with maxima and minima of `number * x`."""
    if x.dtype.is_floating_point and not isinstance(number, complex) and isfinite(number):
        if number > 0:
            yield from kept()
        elif number < 0:
            yield from turned()


def keeps_order(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a cast never turns `a <= b` around."""
    if before == after or before.is_complex or after.is_complex:
        return before == after and not before.is_complex
    if after.is_floating_point or before is torch.bool:
        return True
    wider = after.itemsize > before.itemsize and after is not torch.bool
    return wider and not before.is_floating_point and after.is_signed


@rule(
    aten.asinh.default,
    aten.atan.default,
    aten.ceil.default,
    aten.erf.default,
    aten.exp.default,
    aten.exp2.default,
    aten.expm1.default,
    aten.floor.default,
    aten.hardsigmoid.default,
    aten.hardtanh.default,
    aten.relu.default,
    aten.relu6.default,
    aten.round.default,
    aten.selu.default,
    aten.sigmoid.default,
    aten.sinh.default,
    aten.tanh.default,
    aten.trunc.default,
)
def increasing(x, *_):
    """`out[i] = f(x[i])` with `f(a) <= f(b)` where `a <= b`"""
    yield from broadcast([x])
    if not x.dtype.is_complex:
        yield from kept()


@rule(aten.leaky_relu.default, aten.elu.default, aten.celu.default)
def sloped(x, *numbers):
    """`out[i] = f(x[i])` with `f(a) <= f(b)` where `a <= b`, for slopes above 0"""
    yield from broadcast([x])
    if all(n > 0 for n in numbers):
        yield from kept()


@rule(aten.erfc.default)
def decreasing(x):
    """`out[i] = f(x[i])` with `f(a) >= f(b)` where `a <= b`"""
    yield from broadcast([x])
    yield from turned()


@rule(
    aten.clamp.default,
    aten.clamp.Tensor,
    aten.clamp_min.default,
    aten.clamp_min.Tensor,
    aten.clamp_max.default,
    aten.clamp_max.Tensor,
)
def clamp(x, *bounds, **named):
    """`out[i] = min(max(x[i], least[i]), most[i])`"""
    others = (*bounds, *named.values())
    yield from broadcast(tensors((x, *others)))
    yield from kept(*others)


def _extreme(a, b):
    yield from broadcast([a, b])
    for pending in (MAX, MIN):
        yield (pending, R), pending
        yield (R, pending), pending


@rule(aten.maximum.default, aten.max.other)
def maximum(a, b):
    """`out[i] = max(a[i], b[i])`"""
    yield from _extreme(a, b)
    yield (MAX, MAX), MAX


@rule(aten.minimum.default, aten.min.other)
def minimum(a, b):
    """`out[i] = min(a[i], b[i])`"""
    yield from _extreme(a, b)
    yield (MIN, MIN), MIN


@rule(aten.logical_or.default, aten.bitwise_or.Tensor)
def either(a, b):
    """`out[i] = a[i] or b[i]`"""
    yield from broadcast(tensors((a, b)))
    if isinstance(b, Full) and a.dtype is b.dtype is torch.bool:
        yield (MAX, MAX), MAX


@rule(aten.logical_and.default, aten.bitwise_and.Tensor)
def both(a, b):
    """`out[i] = a[i] and b[i]`"""
    yield from broadcast(tensors((a, b)))
    if isinstance(b, Full) and a.dtype is b.dtype is torch.bool:
        yield (MIN, MIN), MIN


@rule(aten.logical_not.default, aten.bitwise_not.default)
def negation(x):
    """`out[i] = not x[i]`"""
    yield from broadcast([x])
    if x.dtype is torch.bool:
        yield from turned()
