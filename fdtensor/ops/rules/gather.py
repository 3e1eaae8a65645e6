"""`gather` and `scatter`: an index for each element, along one dim."""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.layouts.blocks import length
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import MAX, MIN, PRODUCT, Halo, P, R, S
from fdtensor.ops.notation.local_index import (
    inside,
    local_index,
    subset,
    with_scratch,
    without_scratch,
)
from fdtensor.ops.notation.ops import on, tensors

aten = torch.ops.aten

MOVED = (P, MAX, MIN)
"""The pending placements that pass through an op that only moves elements."""

PENDING = {
    **dict.fromkeys(("add", "sum", "mean"), P),
    **dict.fromkeys(("multiply", "prod"), PRODUCT),
    **dict.fromkeys(("amax", "max"), MAX),
    **dict.fromkeys(("amin", "min"), MIN),
}
"""The pending placement of a reduction's results, by its name; a mean is linear too."""


def matched(d: int, t: Full, size: int) -> Any:
    """The cut of dim `d` of an operand that goes with blocks of a dim of `size` elements."""
    return S(d) if t.shape[d] == size else Halo(d, size, lambda start, stop: (start, stop))


def _gather(at, x, dim, index, *, sparse_grad=False):
    before, of = at.ins
    dim %= max(1, x.ndim)
    for d in range(x.ndim):
        if d != dim:
            x = subset(x, d, before.box[d], of.box[d])
    if x.ndim == 0 or x.shape[dim] == before.full[dim]:
        return aten.gather.default(x, dim, index)
    if x.shape[dim] == 0:
        return x.new_zeros(at.outs[0].shape)
    is_held, place = inside(index, before.box[dim])
    return aten.gather.default(x, dim, place).masked_fill(~is_held, 0)


@on("gather", local=_gather)
def gather(x, dim, index, *, sparse_grad=False):
    """`out[i, j] = x[index[i, j], j]` along dim 0"""
    for p in MOVED:
        yield (p, R), p
    if x.ndim == 0 or index.ndim != x.ndim:
        return
    dim %= x.ndim
    yield (S(dim), R), P  # each index is on one rank, others give zeros
    for d in range(x.ndim):
        yield (R if d == dim else matched(d, x, index.shape[d]), S(d)), S(d)


WRAPPING = (aten.index_fill.int_Tensor, aten.index_fill.int_Scalar)
"""Writes whose indices below 0 count from the end."""


def writing(op):
    """The local computation of a write: a rank writes to its block, the rest to a scratch index."""

    def local(at, x, dim, index, *args, **kwargs):
        dim %= max(1, x.ndim)
        to = at.ins[0]
        for d in range(x.ndim):
            if d != dim and index.ndim == x.ndim:
                index = subset(index, d, at.ins[1].box[d], to.box[d])
                if len(at.ins) == 3:
                    args = (subset(args[0], d, at.ins[2].box[d], to.box[d]), *args[1:])
        if x.ndim == 0 or length(to.box[dim]) == to.full[dim]:
            return op(x, dim, index, *args, **kwargs)
        if op in WRAPPING:
            index = index.remainder(to.full[dim])
        return without_scratch(
            op(with_scratch(x, dim), dim, local_index(index, to.box[dim]), *args, **kwargs), dim
        )

    return local


def written(x, dim, index, *src):
    """Cuts of `x`: each rank writes to its block. The index is for elements, or for slices."""
    for d in range(x.ndim):
        whole = [d == dim % x.ndim or t.ndim < x.ndim for t in (index, *src)]
        others = [
            R if is_whole else matched(d, t, x.shape[d])
            for t, is_whole in zip((index, *src), whole, strict=True)
        ]
        yield (S(d), *others), S(d)


@on("scatter.src scatter.value index_copy index_fill.int_Tensor index_fill.int_Scalar", writing)
def scatter(x, dim, index, src):
    """`out[index[i, j], j] = src[i, j]` along dim 0, or a number, and `x` elsewhere"""
    sources = tensors((src,))
    yield from written(x, dim, index, *sources)
    for p in MOVED:
        if sources or p != P or src == 0:
            yield (p, R, *[p] * len(sources)), p


@on("scatter.value_reduce", writing)
def scatter_value_reduce(x, dim, index, value, *, reduce):
    """`out[k, j] = x[k, j] + sum_i value * (index[i, j] == k)` along dim 0, or the product"""
    yield from written(x, dim, index)
    if x.ndim and index.ndim:  # blocks of the index give terms
        yield (PENDING[reduce], S(dim % x.ndim)), PENDING[reduce]


@on("scatter_add index_add scatter.reduce scatter_reduce.two index_reduce", writing)
def reduced(x, dim, index, src, reduce="sum", *, include_self=True, alpha=1):
    """`out[k, j] = reduce(x[k, j], src[i, j] for i with index[i, j] == k)` along dim 0

    Blocks of the index give terms, but to a mean.
    """
    yield from written(x, dim, index, src)
    pending = PENDING[reduce]
    if reduce != "mean" or x.dtype.is_floating_point:
        yield (pending, R, pending), pending
    if x.ndim and index.ndim and src.ndim and include_self and reduce != "mean":
        dim %= x.ndim
        along = dim if index.ndim == x.ndim else 0
        yield (pending, S(along), matched(dim, src, index.shape[along])), pending
