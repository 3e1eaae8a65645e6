"""Places among sorted values, counts in bins, segments: the results of parts add up."""

from __future__ import annotations

import torch

from fdtensor.layouts.placement import Partial
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import MAX, MIN, P, R, S
from fdtensor.ops.notation.empty import or_nothing
from fdtensor.ops.notation.ops import on
from fdtensor.ops.rules.gather import PENDING
from fdtensor.ops.rules.reduce import reductions

aten = torch.ops.aten


@on("searchsorted.Tensor searchsorted.Scalar")
def searchsorted(lines, x, *, out_int32=False, right=False, side=None, sorter=None):
    """`out[i, j]` = the number of `lines[i]` that are less than `x[i, j]`, or not greater"""
    is_tensor, rest = isinstance(x, Full), 0 if sorter is None else 1
    if sorter is None:
        yield (S(lines.ndim - 1), *[R] * is_tensor), P  # counts of parts add up
    for p in (MAX, MIN) if is_tensor else ():
        yield (R, p, *[R] * rest), p
    for d in range(x.ndim if is_tensor else 0):
        of_line = S(d) if lines.ndim > 1 and d < x.ndim - 1 else R
        yield (of_line, S(d), *[of_line] * rest), S(d)


@on("bucketize.Tensor")
def bucketize(x, boundaries, *, out_int32=False, right=False):
    """`out[i]` = the number of `boundaries` that are less than `x[i]`, or not greater"""
    for (lines, of_x), out in searchsorted(boundaries, x):
        yield (of_x, lines), out


@on("isin.Tensor_Tensor")
def isin(x, values, *, assume_unique=False, invert=False):
    """`out[i] = any(x[i] == v for v in values)`"""
    for d in range(x.ndim):
        yield (S(d), R), S(d)
    for d in range(values.ndim):
        yield (R, S(d)), MIN if invert else MAX


@on("histc")
def histc(x, bins=100, min=0, max=0):
    """`out[b] = sum_i (x[i] in bin b)`, where the range is given"""
    if min != max:
        for d in range(x.ndim):
            yield (S(d),), P


@on("histogram.bins_tensor _histogramdd_from_bin_tensors")
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


@on("hash_tensor", local=_hash)
def hash_tensor(x, dim=(), *, keepdim=False, mode=0):
    """`out[i]` = the bits of all `x[i, j]`, exclusive-ored"""
    yield from reductions(x, dim, keepdim, Partial("bxor"))


def _beside(x, axis, count):
    """Cuts of other dims than that of the segments; those before it cut their lengths too."""
    for d in range(x.ndim):
        if d != axis:
            yield (*[S(d)] * count, S(d) if d < axis else R), S(d)


@on("segment_reduce", or_nothing)
def segment_reduce(x, reduce, *, axis=0, initial=None, **_):
    """`out[s, j] = reduce(x[i, j] for i in segment s)`"""
    yield from _beside(x, axis, 1)
    if initial is None or reduce in ("max", "min"):
        yield (PENDING[reduce], R), PENDING[reduce]


@on("_segment_reduce_backward", or_nothing)
def segment_reduce_backward(grad, out, x, reduce, *, axis=0, **_):
    """`dx[i, j] = grad[s, j]` of the segment that has `i`; a share of it for means and extremes"""
    yield from _beside(x, axis, 3)
    if reduce in ("sum", "mean"):  # for others the kernels read signs
        yield (P, R, R, R), P
