"""Ops that take or write slices or elements, at indices that a tensor holds."""

from __future__ import annotations

import torch

from fdtensor.graph import Full
from fdtensor.notation.core import P, R, S, rule
from fdtensor.notation.held import own, spare, spared
from fdtensor.rules.gather import MOVED
from fdtensor.rules.pointwise import tensors

aten = torch.ops.aten


def _select(at, x, dim, index):
    if x.ndim == 0 or x.shape[dim] == at.ins[0].full[dim]:
        return aten.index_select.default(x, dim, index)
    return taken(at, x, [*[None] * (dim % x.ndim), index.reshape(-1)])


@rule(aten.index_select.default, local=_select)
def index_select(x, dim, index):
    """`out[i, j] = x[index[i], j]` along dim 0"""
    for p in MOVED:
        yield (p, R), p
    if x.ndim:
        dim %= x.ndim
        for d in range(x.ndim):
            yield (S(d), R), P if d == dim else S(d)
        if index.ndim:
            yield (R, S(0)), S(dim)


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


def _numbers(indices) -> bool:
    """Whether these are numbers: how much a mask takes depends on its values."""
    return any(i is not None for i in indices) and not any(
        isinstance(i, Full) and i.dtype in (torch.bool, torch.uint8) for i in indices
    )


def _own(index, size, held):
    return own(torch.where(index < 0, index + size, index), held)


def taken(at, x, indices):
    """`x[indices]` of a block, with zeros for what it does not hold."""
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
    made = aten.index.Tensor(x, indices)
    after = made.ndim - first - len(shape)
    return made.masked_fill(~found.reshape(*found.shape, *[1] * after), 0)


@rule(aten.index.Tensor, aten._unsafe_index.Tensor, local=taken)
def index(x, indices):
    """`out[i, j, k] = x[i, index[j], k]`"""
    if not _numbers(indices):
        return
    dims, first, shape = _indexed(indices)
    rest = (R,) * len(dims)
    for d, to in _kept(x, dims, first, len(shape)).items():
        yield (S(d), *rest), S(to)
    for b, cut in _cuts(indices, dims, shape):
        yield (R, *cut), S(first + b)
    for d in dims:
        yield (S(d), *rest), P
    for p in MOVED:
        yield (p, *rest), p


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
    count = sum(i is not None for i in indices)
    for p in (P,) if accumulate else MOVED:
        yield (p, *[R] * count, p), p
    if not _numbers(indices):
        return
    dims, first, shape = _indexed(indices)
    rest = (R,) * count
    width = x.ndim - count + len(shape)

    def cut_of(d, size):
        d -= width - values.ndim
        return S(d) if d >= 0 and values.shape[d] == size != 1 else R

    for d, to in _kept(x, dims, first, len(shape)).items():
        yield (S(d), *rest, cut_of(to, x.shape[d])), S(d)
    for d in dims:
        yield (S(d), *rest, R), S(d)
    if accumulate:
        for b, cut in _cuts(indices, dims, shape):
            yield (P, *cut, cut_of(first + b, shape[b])), P


@rule(aten.take.default)
def take(x, index):
    """`out[i] = x.flat[index[i]]`"""
    for p in MOVED:
        yield (p, R), p
    for d in range(index.ndim):
        yield (R, S(d)), S(d)


@rule(aten.put.default)
def put(x, index, source, accumulate=False):
    """`out.flat[index[i]] = source[i]`, or that added to `x`, and `x` elsewhere"""
    for p in (P,) if accumulate else MOVED:
        yield (p, R, p), p


@rule(
    aten._unsafe_masked_index.default,
    aten._unsafe_masked_index_put_accumulate.default,
    aten.masked_scatter.default,
    aten.masked_scatter_backward.default,
)
def masked(x, mask, *rest):
    """`out[i] = x[i]`, or elements of others, by a mask and indices; cuts are for its pieces"""
    if x.dtype.is_floating_point and (isinstance(rest[-1], (Full, tuple)) or rest[-1] == 0):
        yield tuple(P if t.dtype == x.dtype else R for t in tensors((x, mask, *rest))), P
