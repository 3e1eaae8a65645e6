"""Places among sorted values, counts in bins, segments: what parts give adds up."""

from __future__ import annotations

from math import prod

import torch

from fdtensor.graph import Full
from fdtensor.notation.core import P, R, S, rule
from fdtensor.placement import Partial
from fdtensor.rules.gather import PENDING
from fdtensor.rules.reduce import MAX, MIN, reductions

aten = torch.ops.aten


@rule(aten.searchsorted.Tensor)
def searchsorted(lines, x, *, out_int32=False, right=False, side=None, sorter=None):
    """`out[i, j]` = how many of `lines[i]` are less than `x[i, j]`, or not greater"""
    rest = () if sorter is None else (R,)
    for d in range(x.ndim):
        if lines.ndim > 1 and d < x.ndim - 1:
            yield (S(d), S(d), *(S(d) for _ in rest)), S(d)
        else:
            yield (R, S(d), *rest), S(d)
    for p in (MAX, MIN):
        yield (R, p, *rest), p
    if sorter is None:
        yield (S(lines.ndim - 1), R), P  # counts of parts add up


@rule(aten.searchsorted.Scalar)
def searchsorted_scalar(lines, x, *, out_int32=False, right=False, side=None, sorter=None):
    """`out` = how many of `lines` are less than `x`, or not greater"""
    if sorter is None:
        yield (S(0),), P


@rule(aten.bucketize.Tensor)
def bucketize(x, boundaries, *, out_int32=False, right=False):
    """`out[i]` = how many of `boundaries` are less than `x[i]`, or not greater"""
    for (lines, of_x), out in searchsorted(boundaries, x):
        yield (of_x, lines), out


@rule(aten.isin.Tensor_Tensor)
def isin(x, values, *, assume_unique=False, invert=False):
    """`out[i] = any(x[i] == v for v in values)`"""
    for d in range(x.ndim):
        yield (S(d), R), S(d)
    for d in range(values.ndim):
        yield (R, S(d)), MIN if invert else MAX


@rule(aten.histc.default)
def histc(x, bins=100, min=0, max=0):
    """`out[b] = sum_i (x[i] in bin b)`, where the range is given"""
    if min != max:
        for d in range(x.ndim):
            yield (S(d),), P


@rule(aten.histogram.bins_tensor, aten._histogramdd_from_bin_tensors.default)
def histogram(x, bins, *, weight=None, density=False):
    """`out[b] = sum_i weight[i] * (x[i] in bin b)`, and the edges; of `x[i, :]` with a list of them

    A density is over the total.
    """
    one = isinstance(bins, Full)
    edges, after = (R,) * (1 if one else len(bins)), (R,) * one
    if not density:
        for d in range(x.ndim if one else x.ndim - 1):
            yield (S(d), *edges, *[S(d)] * (weight is not None)), (P, *after)
        if weight is not None:
            yield (R, *edges, P), (P, *after)


def _hash(at, x, *args, **kwargs):
    if x.numel():
        return aten.hash_tensor.default(x, *args, **kwargs)
    return torch.zeros(at.outs[0].shape, dtype=torch.uint64, device=x.device)


@rule(aten.hash_tensor.default, local=_hash)
def hash_tensor(x, dim=(), *, keepdim=False, mode=0):
    """`out[i]` = the bits of all `x[i, j]`, exclusive-ored"""
    yield from reductions(x, dim, keepdim, Partial("bxor"))


def _beside(x, axis, count):
    """Cuts of other dims than that of the segments; those before it are also of their lengths."""
    for d in range(x.ndim):
        if d != axis:
            yield (*[S(d)] * count, S(d) if d < axis else R), S(d)


def _or_nothing(op):
    """The kernels ask for segments, and for elements."""

    def local(at, *args, **kwargs):
        shape = at.outs[0].shape
        return op(*args, **kwargs) if prod(shape) else args[0].new_zeros(shape)

    return local


@rule(aten.segment_reduce.default, local=_or_nothing(aten.segment_reduce.default))
def segment_reduce(x, reduce, *, axis=0, initial=None, **_):
    """`out[s, j] = reduce(x[i, j] for i in segment s)`"""
    yield from _beside(x, axis, 1)
    if initial is None or reduce in ("max", "min"):
        yield (PENDING[reduce], R), PENDING[reduce]


@rule(
    aten._segment_reduce_backward.default,
    local=_or_nothing(aten._segment_reduce_backward.default),
)
def segment_reduce_backward(grad, out, x, reduce, *, axis=0, **_):
    """`dx[i, j] = grad[s, j]` of the segment that has `i`; a share of it for means and extremes"""
    yield from _beside(x, axis, 3)
    if reduce in ("sum", "mean"):  # of others the kernels look at signs
        yield (P, R, R, R), P
