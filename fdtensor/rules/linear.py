"""Elementwise ops that are linear in some of their arguments: a pending sum of those passes.

Of bools a sum is `or` and without a sign it wraps around: no sum of these passes into other dtypes.
"""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.graph import Full
from fdtensor.rules.core import P, R, rule
from fdtensor.rules.monotone import keeps_order, kept, stretched
from fdtensor.rules.pointwise import broadcast, tensors

aten = torch.ops.aten


def numeric(*args: Any) -> bool:
    """Whether all tensors among the arguments are of dtypes with a sign."""
    return all(t.dtype.is_signed for t in tensors(args))


def alike(*args: Any) -> bool:
    """Whether the tensors among the arguments have one dtype, or dtypes with a sign."""
    return len({t.dtype for t in tensors(args)}) == 1 or numeric(*args)


@rule(
    aten._conj.default,
    aten._conj_copy.default,
    aten._conj_physical.default,
    aten._neg_view.default,
    aten._neg_view_copy.default,
    aten.alias.default,
    aten.alias_copy.default,
    aten.clone.default,
    aten.conj.default,
    aten.conj_physical.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.imag.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.positive.default,
    aten.real.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
)
def same(x, *_, **__):
    """`out[i] = x[i]`, or its conjugate, or a part of it"""
    if isinstance(x, Full):  # autograd takes the conjugate of Python numbers too
        yield from broadcast([x])
        yield (P,), P


@rule(aten.deg2rad.default, aten.rad2deg.default)
def converted(x):
    """`out[i] = c * x[i]`"""
    yield from _scaled(x, 1)


@rule(aten.mul.Scalar)
def mul_scalar(x, number):
    """`out[i] = number * x[i]`"""
    yield from _scaled(x, number)


@rule(aten.div.Scalar)
def div_scalar(x, number):
    """`out[i] = x[i] / number`"""
    yield from _scaled(x, number)


@rule(aten.neg.default)
def neg(x):
    """`out[i] = -x[i]`"""
    yield from _scaled(x, -1)


def _scaled(x, number):
    yield from broadcast([x])
    if numeric(x):
        yield (P,), P
    yield from stretched(x, number)


@rule(aten.complex.default)
def complex_(real, imag):
    """`out[i] = real[i] + 1j * imag[i]`"""
    yield from broadcast([real, imag])
    yield (P, P), P


@rule(aten.lerp.Scalar)
def lerp_scalar(start, end, weight):
    """`out[i] = start[i] + weight * (end[i] - start[i])`"""
    yield from broadcast([start, end])
    yield (P, P), P


@rule(aten.lerp.Tensor)
def lerp(start, end, weight):
    """`out[i] = start[i] + weight[i] * (end[i] - start[i])`"""
    yield from broadcast([start, end, weight])
    yield (P, P, R), P


@rule(aten.addcmul.default)
def addcmul(x, a, b, *, value=1):
    """`out[i] = x[i] + value * a[i] * b[i]`"""
    yield from broadcast([x, a, b])
    if numeric(x, a, b):
        yield (P, P, R), P
        yield (P, R, P), P


@rule(aten.addcdiv.default)
def addcdiv(x, a, b, *, value=1):
    """`out[i] = x[i] + value * a[i] / b[i]`"""
    yield from broadcast([x, a, b])
    if numeric(x, a, b):
        yield (P, P, R), P


def _filled(x, mask, value):
    yield from broadcast(tensors((x, mask, value)))
    if isinstance(value, Full):
        if alike(x, value):
            yield (P, R, P), P
    elif value == 0:
        yield (P, R), P


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(x, mask, value):
    """`out[i] = value if mask[i] else x[i]`"""
    yield from _filled(x, mask, value)


@rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(condition, a, b):
    """`out[i] = a[i] if condition[i] else b[i]`"""
    yield from broadcast(tensors((condition, a, b)))
    if not (isinstance(a, Full) or isinstance(b, Full)):
        return
    numbers = [v for v in (a, b) if not isinstance(v, Full)]
    if all(v == 0 for v in numbers) and (alike(a, b) if not numbers else numeric(a, b)):
        yield (R, *[P] * (2 - len(numbers))), P


def _dropped_nothing(at, x, p, train):
    return x.clone(), torch.ones_like(x, dtype=torch.bool)  # the op gives other dtypes if empty


@rule(aten.native_dropout.default, local=_dropped_nothing)
def native_dropout(x, p, train):
    """`out[i] = x[i]`, `kept[i] = True`: of a dropout that drops nothing"""
    if x.numel and (p == 0 or train is False):
        for before, after in broadcast([x]):
            yield before, (after, after)
        yield (P,), (P, R)


@rule(aten.fill.Scalar, aten.zero.default)
def fill(x, value=0):
    """`out[i] = value`"""
    yield from broadcast([x])
    yield (P,), R  # only the shape is read


@rule(aten.fill.Tensor)
def fill_tensor(x, value):
    """`out[i] = value`"""
    yield from broadcast([x, value])
    yield (P, R), R
    if x.dtype == value.dtype:
        yield (R, P), P
        yield (P, P), P


@rule(aten.copy.default)
def copy(x, source, non_blocking=False):
    """`out[i] = source[i]`"""
    yield from broadcast([x, source])
    yield (P, R), R
    if keeps_sums(source.dtype, x.dtype):
        yield (R, P), P
        yield (P, P), P


def keeps_sums(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a cast of a sum is, without rounding each term, the sum of the casts."""
    if before == after:
        return True
    if before is torch.bool or after is torch.bool or before.is_complex > after.is_complex:
        return False
    if not (after.is_floating_point or after.is_complex):
        return (
            not before.is_floating_point and before.is_signed and after.itemsize > before.itemsize
        )
    if not (before.is_floating_point or before.is_complex):
        return before.is_signed
    halves = before.is_complex < after.is_complex
    return after.itemsize // (2 if halves else 1) >= before.itemsize


@rule(aten._to_copy.default)
def to_copy(x, *, dtype=None, **_):
    """`out[i] = cast(x[i])`"""
    yield from broadcast([x])
    if keeps_sums(x.dtype, x.dtype if dtype is None else dtype):
        yield (P,), P
    if keeps_order(x.dtype, x.dtype if dtype is None else dtype):
        yield from kept()
