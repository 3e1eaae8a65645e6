"""Elementwise ops that are linear in some of their arguments: a pending sum of those passes.

Of bools a sum is `or` and without a sign it wraps around: no sum of these passes into other dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.graph import Full
from fdtensor.notation.core import P, R, rule
from fdtensor.rules.monotone import keeps_order, ordered, shifted
from fdtensor.rules.pointwise import broadcast, overloads, tensors

aten = torch.ops.aten


def numeric(*args: Any) -> bool:
    """Whether all tensors among the arguments are of dtypes with a sign."""
    return all(t.dtype.is_signed for t in tensors(args))


def alike(*args: Any) -> bool:
    """Whether the tensors among the arguments have one dtype, or dtypes with a sign."""
    return len({t.dtype for t in tensors(args)}) == 1 or numeric(*args)


def linear(ins: Sequence[Full], *patterns: str, outs: int = 1):
    """The rows of an op that is linear in those of its first operands that a pattern marks as P."""
    yield from broadcast(ins, outs)
    for pattern in patterns:
        row = tuple(P if mark == "P" else R for mark in pattern.ljust(len(ins), "R"))
        if numeric(*[t for t, placed in zip(ins, row) if placed == P]):
            yield row, (P,) * outs


def scaled(x, number=1):
    """`out[i] = number * x[i]`"""
    yield from linear([x], "P")
    yield from shifted(x, 0, number)


SAME = """
_conj _conj_copy _conj_physical _neg_view _neg_view_copy alias alias_copy clone conj conj_physical
contiguous detach detach_copy imag lift lift_fresh lift_fresh_copy positive real resolve_conj
resolve_neg
"""


@rule(*overloads(SAME))
def same(x, *_, **__):
    """`out[i] = x[i]`, or its conjugate, or a part of it"""
    if isinstance(x, Full):  # autograd takes the conjugate of Python numbers too
        yield from broadcast([x])
        yield (P,), P


rule(*overloads("deg2rad rad2deg mul.Scalar div.Scalar"))(scaled)


@rule(aten.neg.default)
def neg(x):
    """`out[i] = -x[i]`"""
    yield from scaled(x, -1)


@rule(*overloads("complex lerp.Scalar"))
def pair(a, b, weight=1):
    """`out[i] = a[i] + 1j * b[i]`, or `a[i] + weight * (b[i] - a[i])`"""
    yield from linear([a, b], "PP")


@rule(aten.lerp.Tensor)
def lerp(start, end, weight):
    """`out[i] = start[i] + weight[i] * (end[i] - start[i])`"""
    yield from linear([start, end, weight], "PP")


@rule(aten.addcmul.default)
def addcmul(x, a, b, *, value=1):
    """`out[i] = x[i] + value * a[i] * b[i]`"""
    yield from linear([x, a, b], "PPR", "PRP")


@rule(aten.addcdiv.default)
def addcdiv(x, a, b, *, value=1):
    """`out[i] = x[i] + value * a[i] / b[i]`"""
    yield from linear([x, a, b], "PP")


@rule(*overloads("masked_fill.Scalar masked_fill.Tensor"))
def masked_fill(x, mask, value):
    """`out[i] = value if mask[i] else x[i]`"""
    ins = tensors((x, mask, value))
    yield from broadcast(ins)
    if alike(x, value) if isinstance(value, Full) else value == 0:
        yield (P, R, P)[: len(ins)], P


@rule(*overloads("where.self where.ScalarOther where.ScalarSelf where.Scalar"))
def where(condition, a, b):
    """`out[i] = a[i] if condition[i] else b[i]`"""
    ins = tensors((a, b))
    yield from broadcast([condition, *ins])
    numbers = [v for v in (a, b) if not isinstance(v, Full)]
    if ins and (alike(*ins) if not numbers else numbers == [0] and numeric(*ins)):
        yield (R, *[P] * len(ins)), P


def _dropped_nothing(at, x, p, train):
    return x.clone(), torch.ones_like(x, dtype=torch.bool)  # the op gives other dtypes if empty


@rule(aten.native_dropout.default, local=_dropped_nothing)
def native_dropout(x, p, train):
    """`out[i] = x[i]`, `kept[i] = True`: of a dropout that drops nothing"""
    if x.numel and (p == 0 or train is False):
        yield from broadcast([x], outs=2)
        yield (P,), (P, R)


@rule(*overloads("fill.Scalar zero"))
def fill(x, value=0):
    """`out[i] = value`"""
    yield from broadcast([x])
    yield (P,), R  # only the shape is read


@rule(*overloads("fill.Tensor copy"))
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
    floats = after.is_floating_point or after.is_complex
    if not (before.is_floating_point or before.is_complex):
        return before.is_signed and (floats or after.itemsize > before.itemsize)
    halves = before.is_complex < after.is_complex
    return floats and after.itemsize // (2 if halves else 1) >= before.itemsize


@rule(aten._to_copy.default)
def to_copy(x, *, dtype=None, **_):
    """`out[i] = cast(x[i])`"""
    yield from broadcast([x])
    if keeps_sums(x.dtype, x.dtype if dtype is None else dtype):
        yield (P,), P
    if keeps_order(x.dtype, x.dtype if dtype is None else dtype):
        yield from ordered(1)
