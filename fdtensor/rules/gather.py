"""`gather` and `scatter`: an index for each element, along one dim."""

from __future__ import annotations

import torch

from fdtensor.blocks import length
from fdtensor.rules.core import P, R, S, rule
from fdtensor.rules.held import inside, own, part, spare, spared

aten = torch.ops.aten


def _gather(at, x, dim, index, *, sparse_grad=False):
    before, of = at.ins
    dim %= max(1, x.ndim)
    for d in range(x.ndim):
        if d != dim and before.box[d] != of.box[d]:
            x = part(x, d, before.box[d], of.box[d])
    if x.ndim == 0 or x.shape[dim] == before.full[dim]:
        return aten.gather.default(x, dim, index)
    if x.shape[dim] == 0:
        return x.new_zeros(at.outs[0].shape)
    found, place = inside(index, before.box[dim])
    return aten.gather.default(x, dim, place).masked_fill(~found, 0)


@rule(aten.gather.default, local=_gather)
def gather(x, dim, index, *, sparse_grad=False):
    """`out[i, j] = x[index[i, j], j]` along dim 0"""
    yield (P, R), P
    if x.ndim == 0 or index.ndim != x.ndim:
        return
    dim %= x.ndim
    yield (S(dim), R), P  # each index is on one rank, others give zeros
    for d in range(x.ndim):
        together = d != dim and x.shape[d] == index.shape[d]
        yield (S(d) if together else R, S(d)), S(d)


def _scattered(op):
    """A rank writes what falls into its block; the rest goes to an index that it drops."""

    def local(at, x, dim, index, *args, **kwargs):
        dim %= max(1, x.ndim)
        to, of = at.ins[0], at.ins[1]
        for d in range(x.ndim):
            if d != dim:
                index = part(index, d, of.box[d], to.box[d])
                if len(at.ins) == 3:
                    args = (part(args[0], d, at.ins[2].box[d], to.box[d]), *args[1:])
        if x.ndim == 0 or length(to.box[dim]) == to.full[dim]:
            return op(x, dim, index, *args, **kwargs)
        return spare(op(spared(x, dim), dim, own(index, to.box[dim]), *args, **kwargs), dim)

    return local


def _written(x, dim, index, src=None):
    """The rows in which each rank writes to its block."""
    if x.ndim == 0 or index.ndim != x.ndim:
        return
    others = (index,) if src is None else (index, src)
    for d in range(x.ndim):
        together = [d != dim % x.ndim and t.shape[d] == x.shape[d] for t in others]
        yield (S(d), *(S(d) if t else R for t in together)), S(d)


@rule(aten.scatter.src, local=_scattered(aten.scatter.src))
def scatter(x, dim, index, src):
    """`out[index[i, j], j] = src[i, j]` along dim 0, and `x` elsewhere"""
    yield from _written(x, dim, index, src)
    yield (P, R, P), P


@rule(aten.scatter.value, local=_scattered(aten.scatter.value))
def scatter_value(x, dim, index, value):
    """`out[index[i, j], j] = value` along dim 0, and `x` elsewhere"""
    yield from _written(x, dim, index)
    if value == 0:
        yield (P, R), P


@rule(aten.scatter_add.default, local=_scattered(aten.scatter_add.default))
def scatter_add(x, dim, index, src):
    """`out[k, j] = x[k, j] + sum_i src[i, j] * (index[i, j] == k)` along dim 0"""
    yield from _written(x, dim, index, src)
    yield (P, R, P), P
    if x.ndim and index.ndim == x.ndim:
        dim %= x.ndim
        if index.shape[dim] == src.shape[dim]:
            yield (P, S(dim), S(dim)), P


@rule(aten.scatter.value_reduce, local=_scattered(aten.scatter.value_reduce))
def scatter_value_reduce(x, dim, index, value, *, reduce):
    """`out[k, j] = x[k, j] + sum_i value * (index[i, j] == k)` along dim 0, or the product"""
    yield from _written(x, dim, index)


@rule(aten.scatter.reduce, local=_scattered(aten.scatter.reduce))
def scatter_reduce(x, dim, index, src, *, reduce):
    """`out[k, j] = x[k, j] + sum_i src[i, j] * (index[i, j] == k)` along dim 0, or the product"""
    yield from _written(x, dim, index, src)
    if reduce == "add":
        yield (P, R, P), P


@rule(aten.scatter_reduce.two, local=_scattered(aten.scatter_reduce.two))
def scatter_reduce_two(x, dim, index, src, reduce, *, include_self=True):
    """`out[k, j] = reduce(x[k, j], src[i, j] for i with index[i, j] == k)` along dim 0"""
    yield from _written(x, dim, index, src)
    if reduce == "sum":
        yield (P, R, P), P
