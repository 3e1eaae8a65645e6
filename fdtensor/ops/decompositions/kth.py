"""The k-th least along a dim that is cut: its digits, from how many elements have which.

Only counts travel: 256 of them for each byte of the dtype.
"""

from __future__ import annotations

import torch

from fdtensor.ops.decompositions.core import decomposition
from fdtensor.ops.decompositions.scan import placed_along
from fdtensor.ops.notation.core import P, R, S, rule
from fdtensor.ops.own_ops import own_op
from fdtensor.plans.wire import flipped

aten = torch.ops.aten

Tensor = torch.Tensor

BASE = 256

MANY = 2048
"""From how many candidates on the counts of digits are fewer numbers."""


# --- the ops it is made of ------------------------------------------------------------------------


def _kind(dtype: torch.dtype) -> torch.dtype:
    """The dtype of keys: integers with a sign of the same size, of two bytes at least."""
    return {1: torch.int16, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def _keys(x: Tensor) -> Tensor:
    kind = _kind(x.dtype)
    if not x.is_floating_point():
        return x.to(kind, copy=True)
    return torch.where(x.isnan(), torch.iinfo(kind).max, flipped(x.view(kind)))


def _of_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    return flipped(keys).view(dtype) if dtype.is_floating_point else keys.to(dtype, copy=True)


def _at_top(keys: Tensor, shift: int) -> bool:
    return shift == 8 * keys.itemsize - 8


def _counts(keys: Tensor, known: Tensor, shift: int, dim: int) -> Tensor:
    high = (keys >> shift).long()
    among = torch.ones_like(high) if _at_top(keys, shift) else (high >> 8 == known).long()
    digits = high + BASE // 2 if _at_top(keys, shift) else high & (BASE - 1)
    shape = [BASE if d == dim else n for d, n in enumerate(keys.shape)]
    return high.new_zeros(shape).scatter_add_(dim, digits, among)


def _next(counts: Tensor, known: Tensor, k: Tensor, shift: int, dim: int) -> tuple[Tensor, Tensor]:
    digit = (counts.cumsum(dim) < k).sum(dim, keepdim=True)
    before = torch.where(placed_along(counts, dim) < digit, counts, 0).sum(dim, keepdim=True)
    digits = digit - BASE // 2 if _at_top(known, shift) else known << 8 | digit
    return digits.to(known.dtype), k - before


def _like_counts(keys: Tensor, known: Tensor, shift: int, dim: int) -> Tensor:
    shape = [BASE if d == dim else n for d, n in enumerate(keys.shape)]
    return keys.new_empty(shape, dtype=torch.int64)


KEYS = own_op(
    "keys(Tensor x) -> Tensor", _keys, lambda x: torch.empty_like(x, dtype=_kind(x.dtype))
)
"""Integers with a sign in the order of the elements, in which NaN is last."""

OF_KEYS = own_op(
    "of_keys(Tensor keys, ScalarType dtype) -> Tensor",
    _of_keys,
    lambda keys, dtype: torch.empty_like(keys, dtype=dtype),
)
"""The elements that have these keys."""

DIGIT_COUNTS = own_op(
    "digit_counts(Tensor keys, Tensor known, int shift, int dim) -> Tensor", _counts, _like_counts
)
"""How many keys along a dim have each digit at `shift`, of those whose digits above are known."""

NEXT_DIGIT = own_op(
    "next_digit(Tensor counts, Tensor known, Tensor k, int shift, int dim) -> (Tensor, Tensor)",
    _next,
    lambda _counts, known, k, *_: (torch.empty_like(known), torch.empty_like(k)),
)
"""The digits of the k-th key with one more, and which one it is of the keys that have these."""


@rule(KEYS)
def keys(x):
    """`out[i] = key(x[i])`"""
    yield from (((S(d),), S(d)) for d in range(x.ndim))


@rule(OF_KEYS)
def of_keys(keys, dtype):
    """`out[i] = x[i]` where `keys[i] = key(x[i])`"""
    yield from (((S(d),), S(d)) for d in range(keys.ndim))


@rule(DIGIT_COUNTS)
def digit_counts(keys, known, shift, dim):
    """`out[i, j] = sum_k (digit(keys[i, k]) == j)`"""
    for d in range(keys.ndim):
        yield ((S(d), R), P) if d == dim else ((S(d), S(d)), S(d))


@rule(NEXT_DIGIT)
def next_digit(counts, known, k, shift, dim):
    """`digits[i]`: the `j` where `sum_(l <= j) counts[i, l]` is `k[i]` or more"""
    for d in range(counts.ndim):
        if d != dim:
            yield (S(d), S(d), S(d)), (S(d), S(d))


# --- what is selected by them ---------------------------------------------------------------------


def _select(x: Tensor, k: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The `k`-th least along `dim`, and the first place where it is."""
    keys = KEYS(x)
    known = torch.zeros_like(k, dtype=keys.dtype)
    for shift in range(8 * keys.itemsize - 8, -1, -8):
        known, k = NEXT_DIGIT(DIGIT_COUNTS(keys, known, shift, dim), known, k, shift, dim)
    places = torch.where(keys == known, placed_along(keys, dim), x.shape[dim])
    values, places = OF_KEYS(known, x.dtype), places.amin(dim, keepdim=True)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _each(x: Tensor, k: int, dim: int) -> Tensor:
    return x.new_full([1 if d == dim else n for d, n in enumerate(x.shape)], k, dtype=torch.int64)


@decomposition(aten.kthvalue.default)
def kthvalue(x, k, dim=-1, keepdim=False):
    """`values[i]` is the last of the `k` least of `x[i, :]`, or the first of the rest."""
    few = min(k, x.shape[dim] + 1 - k) if x.ndim else k
    if few >= MANY:
        return _select(x, _each(x, k, dim % x.ndim), dim % x.ndim, keepdim)
    values, at = torch.topk(x, few, dim, largest=few != k)
    values, at = (t.narrow(dim, few - 1, 1) if t.ndim else t for t in (values, at))
    return (values, at) if keepdim or not x.ndim else (values.squeeze(dim), at.squeeze(dim))


def _along(x: Tensor, dim: int) -> int:
    if not x.ndim or x.shape[dim] < 2 * MANY:
        raise NotImplementedError("a few elements are gathered sooner")
    return dim % x.ndim


@decomposition(aten.median.dim)
def median_of_dim(x, dim, keepdim=False):
    """`values[i]` is the lower one in the middle of `x[i, :]`, NaN if there is any"""
    dim = _along(x, dim)
    k = _each(x, (x.shape[dim] + 1) // 2, dim)
    if x.is_floating_point():
        k = torch.where(x.isnan().any(dim, keepdim=True), x.shape[dim], k)
    return _select(x, k, dim, keepdim)


@decomposition(aten.nanmedian.dim)
def nanmedian_of_dim(x, dim, keepdim=False):
    """`values[i]` is the lower one in the middle of the numbers in `x[i, :]`, NaN without any"""
    dim = _along(x, dim)
    numbers = (x == x).sum(dim, keepdim=True)
    return _select(x, ((numbers + 1) // 2).clamp(min=1), dim, keepdim)


@decomposition(aten.median.default)
def median(x):
    """The lower one in the middle of all elements, NaN if there is any"""
    return median_of_dim(x.flatten(), 0)[0]


@decomposition(aten.nanmedian.default)
def nanmedian(x):
    """The lower one in the middle of all numbers, NaN without any"""
    return nanmedian_of_dim(x.flatten(), 0)[0]
