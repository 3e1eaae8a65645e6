"""Ops that read or write slices or elements at indices in a tensor."""

from __future__ import annotations

import torch

from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import P, R, S
from fdtensor.ops.notation.empty import or_nothing
from fdtensor.ops.notation.local_index import local_index, with_scratch, without_scratch
from fdtensor.ops.notation.ops import on, tensors
from fdtensor.ops.rules.gather import MOVED

aten = torch.ops.aten


def _select(at, x, dim, index):
    if x.ndim == 0 or x.shape[dim] == at.ins[0].full[dim]:
        return aten.index_select.default(x, dim, index)
    return taken(at, x, [*[None] * (dim % x.ndim), index.reshape(-1)])


@on("index_select", local=_select)
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
    """The dims with an index, the output dim where those of the indices start, and their shape."""
    dims = [k for k, index in enumerate(indices) if index is not None]
    shape = torch.broadcast_shapes(*(indices[k].shape for k in dims))
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    return dims, dims[0] if adjacent else 0, tuple(shape)


def look_ups(x, indices, *beside):
    """Cuts of `x`, of each index, of operands `beside` that broadcast to the result, and of that.

    First of dims without an index, then of those of the indices.
    """
    dims, first, shape = _indexed(indices)
    rest, whole = [d for d in range(x.ndim) if d not in dims], [R] * len(dims)
    sizes = [*(x.shape[d] for d in rest[:first]), *shape, *(x.shape[d] for d in rest[first:])]

    def of(t, size, d):
        d -= len(size) - t.ndim
        return S(d) if d >= 0 and t.shape[d] == size[d - t.ndim] else R

    for i, d in enumerate(rest):
        to = i if i < first else i + len(shape)
        yield S(d), whole, [of(t, sizes, to) for t in beside], S(to)
    for b in range(len(shape)):
        cut = [of(indices[k], shape, b) for k in dims]
        if cut != whole:
            yield R, cut, [of(t, sizes, first + b) for t in beside], S(first + b)


def _numbers(indices) -> bool:
    """Whether these are numbers: the size of what a mask selects depends on its values."""
    return any(i is not None for i in indices) and not any(
        isinstance(i, Full) and i.dtype in (torch.bool, torch.uint8) for i in indices
    )


def _own(index, size, held):
    return local_index(torch.where(index < 0, index + size, index), held)


def taken(at, x, indices, counting=()):
    """`x[indices]` of a block, with zeros for indices that it does not hold.

    Those of the dims `counting` count the block.
    """
    block, is_held = at.ins[0], None
    dims, first, shape = _indexed(indices)
    for k in dims:
        if x.shape[k] != block.full[k] and k not in counting:
            place = _own(indices[k], block.full[k], block.box[k])
            in_block = place < x.shape[k]
            is_held = in_block if is_held is None else is_held & in_block
            indices[k] = torch.where(in_block, place, 0)
    if is_held is None:
        return aten.index.Tensor(x, indices)
    if any(x.shape[k] == 0 for k in dims):
        return x.new_zeros(at.outs[0].shape)
    out = aten.index.Tensor(x, indices)
    after = out.ndim - first - len(shape)
    return out.masked_fill(~is_held.reshape((*is_held.shape, *[1] * after)), 0)


@on("index.Tensor _unsafe_index.Tensor", local=taken)
def index(x, indices):
    """`out[i, j, k] = x[i, index[j], k]`"""
    if not _numbers(indices):
        return
    dims = _indexed(indices)[0]
    rest = [R] * len(dims)
    for of_x, cuts, _, out in look_ups(x, indices):
        yield (of_x, *cuts), out
    for d in dims:
        yield (S(d), *rest), P
    for p in MOVED:
        yield (p, *rest), p


def put_at(at, x, indices, values, accumulate=False, counting=()):
    """A block with values at indices, of which those that it does not hold are passed over."""
    block = at.ins[0]
    wide = [k for k, i in enumerate(indices) if i is not None and x.shape[k] != block.full[k]]
    wide = [k for k in wide if k not in counting]
    for k in wide:
        indices[k] = _own(indices[k], block.full[k], block.box[k])
    for k in wide:
        x = with_scratch(x, k)
    out = aten.index_put.default(x, indices, values, accumulate)
    for k in wide:
        out = without_scratch(out, k)
    return out


@on("index_put _unsafe_index_put", local=put_at)
def index_put(x, indices, values, accumulate=False):
    """`out[i, index[j], k] = values[i, j, k]`, or that added to `x`, and `x` elsewhere"""
    dims = [k for k, i in enumerate(indices) if i is not None]
    rest = [R] * len(dims)
    for p in (P,) if accumulate else MOVED:
        yield (p, *rest, p), p
    if not _numbers(indices):
        return
    for of_x, cuts, others, _ in look_ups(x, indices, values):
        if of_x != R:
            yield (of_x, *cuts, *others), of_x
        elif accumulate:
            yield (P, *cuts, *others), P
    for d in dims:
        yield (S(d), *rest, R), S(d)


@on("take")
def take(x, index):
    """`out[i] = x.flat[index[i]]`"""
    for p in MOVED:
        yield (p, R), p
    for d in range(index.ndim):
        yield (R, S(d)), S(d)


@on("put")
def put(x, index, source, accumulate=False):
    """`out.flat[index[i]] = source[i]`, or that added to `x`, and `x` elsewhere"""
    for p in (P,) if accumulate else MOVED:
        yield (p, R, p), p
    for d in range(index.ndim if accumulate and index.shape == source.shape else 0):
        yield (P, S(d), S(d)), P


def _linear(x, *others):
    """The row in which the tensors of the dtype of `x` are pending; a mask is not."""
    if x.dtype.is_floating_point:
        yield tuple(P if t.dtype == x.dtype else R for t in tensors((x, *others))), P


@on("_unsafe_masked_index", or_nothing)
def masked_index(x, mask, indices, fill):
    """`out[i, j, k] = x[i, index[j], k] if mask[i, j, k] else fill`"""
    if fill == 0:
        yield from _linear(x, mask, indices)
    for of_x, cuts, others, out in look_ups(x, indices, mask):
        yield (of_x, *others, *cuts), out


@on("_unsafe_masked_index_put_accumulate", or_nothing)
def masked_index_put(x, mask, indices, values):
    """`out[i, index[j], k] = x[i, index[j], k] + values[i, j, k] * mask[i, j, k]`"""
    yield from _linear(x, mask, indices, values)
    for of_x, cuts, (of_mask, of_values), _ in look_ups(x, indices, mask, values):
        into = P if of_x == R else of_x
        yield (into, of_mask, *cuts, of_values), into


@on("masked_scatter masked_scatter_backward")
def masked_scatter(x, mask, source):
    """`out[i] = source.flat[sum(mask[:i])] if mask[i] else x[i]`, or the gradient of `source`"""
    yield from _linear(x, mask, source)
