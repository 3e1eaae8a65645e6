"""Elementwise ops that are linear in some arguments, which may stay pending sums.

A sum of bools is `or`, and one of unsigned integers wraps around: neither passes into other dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import P, R, rule
from fdtensor.ops.notation.dtypes import alike, keeps_order, keeps_sums, numeric
from fdtensor.ops.notation.each import each
from fdtensor.ops.notation.ops import on, tensors
from fdtensor.ops.precision import ROUNDED
from fdtensor.ops.rules.monotone import ordered, shifted
from fdtensor.ops.rules.pointwise import broadcast

aten = torch.ops.aten


def linear(ins: Sequence[Full], *patterns: str, outs: int = 1):
    """The rows of an op that is linear in the operands that a pattern, like `"PR"`, marks by P."""
    yield from broadcast(ins, outs)
    for pattern in patterns:
        row = tuple(P if mark == "P" else R for mark in pattern.ljust(len(ins), "R"))
        if numeric(*[t for t, placed in zip(ins, row, strict=True) if placed == P]):
            yield row, (P,) * outs


@on("deg2rad rad2deg mul.Scalar div.Scalar")
def scaled(x, number=1):
    """`out[i] = number * x[i]`"""
    yield from linear([x], "P")
    yield from shifted(x, 0, number)


SAME = """
_conj _conj_copy _conj_physical _neg_view _neg_view_copy alias alias_copy clone conj conj_physical
contiguous detach detach_copy imag lift lift_fresh lift_fresh_copy positive real resolve_conj
resolve_neg
"""


@on(SAME)
def same(x, *_, **__):
    """`out[i] = x[i]`, or its conjugate, or a part of it"""
    if isinstance(x, Full):  # autograd takes the conjugate of Python numbers too
        yield from broadcast([x])
        yield (P,), P


@rule(aten.neg.default)
def neg(x):
    """`out[i] = -x[i]`"""
    yield from scaled(x, -1)


PATTERNS = {
    aten.complex.default: ["PP"],  # a[i] + 1j * b[i]
    aten.lerp.Scalar: ["PP"],  # start[i] + weight * (end[i] - start[i])
    aten.lerp.Tensor: ["PPR"],  # start[i] + weight[i] * (end[i] - start[i])
    aten.addcmul.default: ["PPR", "PRP"],  # x[i] + value * a[i] * b[i]
    aten.addcdiv.default: ["PPR"],  # x[i] + value * a[i] / b[i]
}
"""The operands of an op that may be pending at once, in patterns."""


@each(*PATTERNS)
def patterned(op, named):
    """The formula of each op: see `PATTERNS`."""
    yield from linear(tensors(tuple(named.values())), *PATTERNS[op])


@on("masked_fill.Scalar masked_fill.Tensor")
def masked_fill(x, mask, value):
    """`out[i] = value if mask[i] else x[i]`"""
    ins = tensors((x, mask, value))
    yield from broadcast(ins)
    if alike(x, value) if isinstance(value, Full) else value == 0:
        yield (P, R, P)[: len(ins)], P


@on("where.self where.ScalarOther where.ScalarSelf where.Scalar")
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


@on("fill.Scalar zero")
def fill(x, value=0):
    """`out[i] = value`"""
    yield from broadcast([x])
    yield (P,), R  # only the shape is read


@on("fill.Tensor copy")
def copy(x, source, non_blocking=False):
    """`out[i] = source[i]`"""
    yield from broadcast([x, source])
    yield (P, R), R
    if keeps_sums(source.dtype, x.dtype):
        yield (R, P), P
        yield (P, P), P


@rule(aten._to_copy.default)
def to_copy(x, *, dtype=None, **_):
    """`out[i] = cast(x[i])`"""
    yield from broadcast([x])
    if keeps_sums(x.dtype, x.dtype if dtype is None else dtype):
        yield (P,), P
    if keeps_order(x.dtype, x.dtype if dtype is None else dtype):
        yield from ordered(1)


@rule(ROUNDED)
def rounded(x, dtype):
    """`out[i] = cast(x[i])`, of each term of a sum"""
    yield from broadcast([x])
    yield (P,), P
