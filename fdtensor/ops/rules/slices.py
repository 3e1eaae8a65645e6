"""Slices at known indices, and paddings: each rank reads or writes the part in its block."""

from __future__ import annotations

import torch

from fdtensor.layouts.blocks import intersect, locate
from fdtensor.ops.notation.core import P, R, S, Window
from fdtensor.ops.notation.local_index import subset
from fdtensor.ops.notation.ops import on
from fdtensor.ops.notation.runs import taken

aten = torch.ops.aten


def _range(size: int, start: int | None, end: int | None, step: int) -> range:
    """The indices of a slice."""
    return range(*slice(start, end, step).indices(size))


def _sliced(shape, dim, start, end, step):
    """The placements of a tensor, each with that of its slice."""
    yield (P,), P
    dim %= len(shape)
    chosen = _range(shape[dim], start, end, step)
    for d in range(len(shape)):
        if d != dim or len(chosen) == shape[dim]:
            yield (S(d),), S(d)
        else:
            yield (S(d),), Window(d, shape[d], chosen.start, chosen.stop, step)


def _slice(at, x, dim=0, start=None, end=None, step=1):
    dim %= x.ndim
    chosen = _range(at.ins[0].full[dim], start, end, step)
    return taken(x, dim, at.ins[0].box[dim], at.outs[0].box[dim], [chosen])


@on("slice.Tensor", local=_slice)
def slice_(x, dim=0, start=None, end=None, step=1):
    """`out[i] = x[start + i * step]`"""
    yield from _sliced(x.shape, dim, start, end, step)


def _local_slice(src, dim, held, to, start, end, step):
    """The part of `src` that goes to the block `to`, and the slice of it that it goes to."""
    chosen = _range(to.full[dim], start, end, step)
    first, last = (
        min(len(chosen), max(0, -(-(i - chosen.start) // step)))
        for i in (to.start[dim], to.stop[dim])
    )
    if first >= last:
        return src.narrow(dim, 0, 0), dim, 0, 0, step
    src = subset(src, dim, held.box[dim], ((first, last),))
    low = to.start[dim]
    return src, dim, chosen[first] - low, chosen[last - 1] + 1 - low, step


def _slice_backward(at, grad, input_sizes, dim, start, end, step):
    out, dim = at.outs[0], dim % len(input_sizes)
    grad, *where = _local_slice(grad, dim, at.ins[0], out, start, end, step)
    return aten.slice_backward.default(grad, out.shape, *where)


@on("slice_backward", local=_slice_backward, contiguous=True)
def slice_backward(grad, input_sizes, dim, start, end, step):
    """`out[start + i * step] = grad[i]`, and 0 elsewhere"""
    if len(_range(input_sizes[dim], start, end, step)) < input_sizes[dim]:  # else rows mix
        yield (R,), S(dim % len(input_sizes))
    for (whole,), sliced in _sliced(input_sizes, dim, start, end, step):
        yield (sliced,), whole


def _slice_scatter(at, x, src, dim=0, start=None, end=None, step=1):
    where = _local_slice(src, dim % x.ndim, at.ins[1], at.ins[0], start, end, step)
    return aten.slice_scatter.default(x, *where)


@on("slice_scatter", local=_slice_scatter, contiguous=True)
def slice_scatter(x, src, dim=0, start=None, end=None, step=1):
    """`out[start + i * step] = src[i]`, and `x` elsewhere"""
    if len(_range(x.shape[dim], start, end, step)) < x.shape[dim]:
        yield (S(dim % x.ndim), R), S(dim % x.ndim)
    for (whole,), sliced in _sliced(x.shape, dim, start, end, step):
        yield (whole, sliced), whole


def _selected(ndim, dim, own):
    """The placements of a tensor, each with that of one index of `dim`, `own` for a cut `dim`."""
    yield (P,), P
    for d in range(ndim):
        yield (S(d),), own if d == dim % ndim else S(d - (d > dim % ndim))


def _place(block, dim: int, index: int) -> int | None:
    """The position of an index in a block; None where the block does not hold it."""
    index %= block.full[dim]
    common = intersect(block.box[dim], ((index, index + 1),))
    return locate(block.box[dim], common)[0][0] if common else None


def _select(at, x, dim, index):
    place, dim = _place(at.ins[0], dim, index), dim % x.ndim
    if place is None:
        return x.new_zeros([*x.shape[:dim], *x.shape[dim + 1 :]])
    return aten.select.int(x, dim, place)


@on("select.int select_copy.int", local=_select)
def select(x, dim, index):
    """`out[i] = x[index, i]` along dim 0"""
    yield from _selected(x.ndim, dim, P)  # the rank that holds it, others zeros


def _unbind(at, x, dim=0):
    if x.shape[dim] == at.ins[0].full[dim]:
        return aten.unbind.int(x, dim)
    return [_select(at, x, dim, i) for i in range(at.ins[0].full[dim])]


@on("unbind.int unbind_copy.int", local=_unbind)
def unbind(x, dim=0):
    """`outs[k][i] = x[k, i]` along dim 0"""
    for whole, one in _selected(x.ndim, dim, P):
        yield whole, (one,) * x.shape[dim]


def _select_backward(at, grad, input_sizes, dim, index):
    place = _place(at.outs[0], dim, index)
    if place is None:
        return grad.new_zeros(at.outs[0].shape)
    return aten.select_backward.default(grad, at.outs[0].shape, dim, place)


@on("select_backward", local=_select_backward)
def select_backward(grad, input_sizes, dim, index):
    """`out[index, i] = grad[i]` along dim 0, and 0 elsewhere"""
    for (whole,), one in _selected(len(input_sizes), dim, R):
        yield (one,), whole


def _margins(ndim: int, pad) -> dict[int, tuple[int, int]]:
    """The numbers of entries added before and after each dim; `pad` counts from the last dim."""
    return {
        ndim - 1 - i: pair
        for i, pair in enumerate(zip(pad[::2], pad[1::2], strict=True))
        if any(pair)
    }


def _pad(at, x, pad, value=0):
    held, out, local = at.ins[0], at.outs[0], list(pad)
    for d, (before, _) in _margins(x.ndim, pad).items():
        low, high = out.start[d] - before, out.stop[d] - before  # in indices of x
        common = intersect(held.box[d], ((low, high),))
        start, stop = common[0] if common else (low, low)
        x = subset(x, d, held.box[d], common)
        local[2 * (x.ndim - 1 - d) : 2 * (x.ndim - d)] = start - low, high - stop
    return aten.constant_pad_nd.default(x, local, value)


@on("constant_pad_nd", local=_pad)
def constant_pad(x, pad, value=0):
    """`out[before + i] = x[i]`, and `value` elsewhere"""
    if value == 0:
        yield (P,), P
    margins = _margins(x.ndim, pad)
    for d, size in enumerate(x.shape):
        before, after = margins.get(d, (0, 0))
        yield (S(d),), Window(d, size, -before, size + after) if d in margins else S(d)
