"""Ops that take or write slices or elements, at indices that a tensor holds."""

from __future__ import annotations

import torch

from fdtensor.graph import Full
from fdtensor.rules.core import P, R, S, rule
from fdtensor.rules.held import inside, own, spare, spared

aten = torch.ops.aten


def _select(at, x, dim, index):
    dim %= max(1, x.ndim)
    if x.ndim == 0 or x.shape[dim] == at.ins[0].full[dim]:
        return aten.index_select.default(x, dim, index)
    if x.shape[dim] == 0:
        return x.new_zeros(at.outs[0].shape)
    found, place = inside(index, at.ins[0].box[dim])
    shape = [-1 if d == dim else 1 for d in range(x.ndim)]
    return aten.index_select.default(x, dim, place).masked_fill(~found.reshape(shape), 0)


@rule(aten.index_select.default, local=_select)
def index_select(x, dim, index):
    """`out[i, j] = x[index[i], j]` along dim 0"""
    yield (P, R), P
    if x.ndim:
        dim %= x.ndim
        for d in range(x.ndim):
            yield (S(d), R), P if d == dim else S(d)
        if index.ndim:
            yield (R, S(0)), S(dim)


def _along(op):
    """A rank writes the slices whose index it holds; others go to an index that it drops."""

    def local(at, x, dim, index, *args, **kwargs):
        dim %= max(1, x.ndim)
        if x.ndim == 0 or x.shape[dim] == at.ins[0].full[dim]:
            return op(x, dim, index, *args, **kwargs)
        return spare(op(spared(x, dim), dim, own(index, at.ins[0].box[dim]), *args, **kwargs), dim)

    return local


def _written(x, dim, sliced):
    for d in range(x.ndim):
        yield (S(d), R, R if d == dim % x.ndim or not sliced.ndim else S(d)), S(d)


@rule(aten.index_add.default, local=_along(aten.index_add.default))
def index_add(x, dim, index, source, *, alpha=1):
    """`out[k, j] = x[k, j] + alpha * sum_i source[i, j] * (index[i] == k)` along dim 0"""
    yield from _written(x, dim, source)
    yield (P, R, P), P
    if x.ndim and index.ndim and source.ndim:
        yield (P, S(0), S(dim % x.ndim)), P


@rule(aten.index_copy.default, local=_along(aten.index_copy.default))
def index_copy(x, dim, index, source):
    """`out[index[i], j] = source[i, j]` along dim 0, and `x` elsewhere"""
    yield from _written(x, dim, source)
    yield (P, R, P), P


@rule(aten.index_reduce.default, local=_along(aten.index_reduce.default))
def index_reduce(x, dim, index, source, reduce, *, include_self=True):
    """`out[k, j] = reduce(x[k, j], source[i, j] for i with index[i] == k)` along dim 0"""
    yield from _written(x, dim, source)


@rule(aten.index_fill.int_Scalar, local=_along(aten.index_fill.int_Scalar))
def index_fill(x, dim, index, value):
    """`out[index[i], j] = value` along dim 0, and `x` elsewhere"""
    for d in range(x.ndim):
        yield (S(d), R), S(d)
    if value == 0:
        yield (P, R), P


@rule(aten.index_fill.int_Tensor, local=_along(aten.index_fill.int_Tensor))
def index_fill_tensor(x, dim, index, value):
    """`out[index[i], j] = value` along dim 0, and `x` elsewhere"""
    for d in range(x.ndim):
        yield (S(d), R, R), S(d)
    yield (P, R, P), P


def _indexed(indices) -> tuple[list[int], int, tuple[int, ...]]:
    """The dims with an index, the output dim at which those of the indices come, their shape."""
    dims = [k for k, index in enumerate(indices) if index is not None]
    shape = torch.broadcast_shapes(*(indices[k].shape for k in dims))
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    return dims, dims[0] if adjacent else 0, tuple(shape)


def _kept(x, dims: list[int], first: int, width: int) -> dict[int, int]:
    """The output dim of each dim without an index."""
    rest = [d for d in range(x.ndim) if d not in dims]
    return {d: i if i < first else i + width for i, d in enumerate(rest)}


def _cuts(indices, dims, shape):
    """For each dim that the indices have together, its cut in each of them."""
    for b, size in enumerate(shape):
        at = [b - (len(shape) - indices[k].ndim) for k in dims]
        cut = [i >= 0 and indices[k].shape[i] == size != 1 for k, i in zip(dims, at)]
        if any(cut):
            yield b, tuple(S(i) if c else R for i, c in zip(at, cut))


def _counts(indices) -> bool:
    """Whether these are numbers: how much a mask takes depends on its values."""
    return any(i is not None for i in indices) and not any(
        isinstance(i, Full) and i.dtype in (torch.bool, torch.uint8) for i in indices
    )


def _own(index, size, held):
    return own(torch.where(index < 0, index + size, index), held)


def _taken(at, x, indices):
    block, found = at.ins[0], None
    dims, first, shape = _indexed(indices)
    for k in dims:
        if x.shape[k] != block.full[k]:
            place = _own(indices[k], block.full[k], block.box[k])
            here = place < x.shape[k]
            found = here if found is None else found & here
            indices[k] = torch.where(here, place, 0)
    if found is None:
        return aten.index.Tensor(x, indices)
    if any(x.shape[k] == 0 for k in dims):
        return x.new_zeros(at.outs[0].shape)
    taken = aten.index.Tensor(x, indices)
    after = taken.ndim - first - len(shape)
    return taken.masked_fill(~found.reshape(*found.shape, *[1] * after), 0)


@rule(aten.index.Tensor, aten._unsafe_index.Tensor, local=_taken)
def index(x, indices):
    """`out[i, j, k] = x[i, index[j], k]`"""
    if not _counts(indices):
        return
    dims, first, shape = _indexed(indices)
    rest = (R,) * len(dims)
    for d, to in _kept(x, dims, first, len(shape)).items():
        yield (S(d), *rest), S(to)
    for b, cut in _cuts(indices, dims, shape):
        yield (R, *cut), S(first + b)
    for d in dims:
        yield (S(d), *rest), P
    yield (P, *rest), P


def _put(at, x, indices, values, accumulate=False):
    block = at.ins[0]
    wide = [k for k, i in enumerate(indices) if i is not None and x.shape[k] != block.full[k]]
    for k in wide:
        indices[k] = _own(indices[k], block.full[k], block.box[k])
    for k in wide:
        x = spared(x, k)
    made = aten.index_put.default(x, indices, values, accumulate)
    for k in wide:
        made = spare(made, k)
    return made


@rule(aten.index_put.default, aten._unsafe_index_put.default, local=_put)
def index_put(x, indices, values, accumulate=False):
    """`out[i, index[j], k] = values[i, j, k]`, or that added to `x`, and `x` elsewhere"""
    if not _counts(indices):
        return
    dims, first, shape = _indexed(indices)
    rest = (R,) * len(dims)
    width = x.ndim - len(dims) + len(shape)

    def cut_of(d, size):
        d -= width - values.ndim
        return S(d) if d >= 0 and values.shape[d] == size != 1 else R

    for d, to in _kept(x, dims, first, len(shape)).items():
        yield (S(d), *rest, cut_of(to, x.shape[d])), S(d)
    for d in dims:
        yield (S(d), *rest, R), S(d)
    yield (P, *rest, P), P
    if accumulate:
        for b, cut in _cuts(indices, dims, shape):
            yield (P, *cut, cut_of(first + b, shape[b])), P


def _flat(at, x, index):
    cut = x.ndim == 1 and x.shape != at.ins[0].full
    return _taken(at, x, [index]) if cut else aten.take.default(x, index)


@rule(aten.take.default, local=_flat)
def take(x, index):
    """`out[i] = x.flat[index[i]]`"""
    yield (P, R), P
    for d in range(index.ndim):
        yield (R, S(d)), S(d)
    if x.ndim == 1:
        yield (S(0), R), P
