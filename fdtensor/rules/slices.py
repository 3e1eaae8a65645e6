"""Parts of a tensor at known places, and paddings: each rank takes or writes what it holds."""

from __future__ import annotations

import torch

from fdtensor.blocks import length
from fdtensor.rules.core import P, R, S, Window, rule
from fdtensor.rules.held import part

aten = torch.ops.aten


def _range(size: int, start: int | None, end: int | None, step: int) -> range:
    """The indices of a slice."""
    return range(*slice(start, end, step).indices(size))


def _local_slice(chosen: range, low: int, high: int) -> tuple[int, int, tuple[int, int]]:
    """Of a slice what is in `low` to `high`: its start and stop there, and which entries."""
    first, last = (
        min(len(chosen), max(0, -(-(i - chosen.start) // chosen.step))) for i in (low, high)
    )
    if first >= last:
        return 0, 0, (0, 0)
    return chosen[first] - low, chosen[last - 1] + 1 - low, (first, last)


def _slice(at, x, dim=0, start=None, end=None, step=1):
    dim %= x.ndim
    block = at.ins[0]
    chosen = _range(block.full[dim], start, end, step)
    low, high, _ = _local_slice(chosen, block.start[dim], block.stop[dim])
    return aten.slice.Tensor(x, dim, low, high, step)


@rule(aten.slice.Tensor, local=_slice, contiguous=True)
def slice_(x, dim=0, start=None, end=None, step=1):
    """`out[i] = x[start + i * step]`"""
    yield (P,), P
    dim %= x.ndim
    size = x.shape[dim]
    chosen = _range(size, start, end, step)
    for d in range(x.ndim):
        if d != dim or len(chosen) == size:
            yield (S(d),), S(d)
    if len(chosen) != size:
        yield (S(dim),), Window(dim, size, chosen.start, chosen.stop, step)


def _slice_backward(at, grad, input_sizes, dim, start, end, step):
    out, dim = at.outs[0], dim % len(input_sizes)
    if length(at.ins[0].box[dim]) == at.ins[0].full[dim] and length(out.box[dim]) == out.full[dim]:
        return aten.slice_backward.default(grad, out.shape, dim, start, end, step)
    chosen = _range(input_sizes[dim], start, end, step)
    low, high, (a, b) = _local_slice(chosen, out.start[dim], out.stop[dim])
    grad = part(grad, dim, at.ins[0].box[dim], ((a, b),) if a < b else ())
    return aten.slice_backward.default(grad, out.shape, dim, low, high, step)


@rule(aten.slice_backward.default, local=_slice_backward, contiguous=True)
def slice_backward(grad, input_sizes, dim, start, end, step):
    """`out[start + i * step] = grad[i]`, and 0 elsewhere"""
    yield (P,), P
    dim %= len(input_sizes)
    size = input_sizes[dim]
    chosen = _range(size, start, end, step)
    for d in range(len(input_sizes)):
        if d != dim or len(chosen) == size:
            yield (S(d),), S(d)
    yield (R,), S(dim)
    if len(chosen) != size:
        yield (Window(dim, size, chosen.start, chosen.stop, step),), S(dim)


def _slice_scatter(at, x, src, dim=0, start=None, end=None, step=1):
    dim %= x.ndim
    to, of = at.ins
    chosen = _range(to.full[dim], start, end, step)
    low, high, (a, b) = _local_slice(chosen, to.start[dim], to.stop[dim])
    src = part(src, dim, of.box[dim], ((a, b),) if a < b else ())
    return aten.slice_scatter.default(x, src, dim, low, high, step)


@rule(aten.slice_scatter.default, local=_slice_scatter, contiguous=True)
def slice_scatter(x, src, dim=0, start=None, end=None, step=1):
    """`out[start + i * step] = src[i]`, and `x` elsewhere"""
    yield (P, P), P
    dim %= x.ndim
    size = x.shape[dim]
    chosen = _range(size, start, end, step)
    for d in range(x.ndim):
        if d != dim or len(chosen) == size:
            yield (S(d), S(d)), S(d)
    yield (S(dim), R), S(dim)
    if len(chosen) != size:
        yield (S(dim), Window(dim, size, chosen.start, chosen.stop, step)), S(dim)


def _place(block, dim: int, index: int) -> int | None:
    """The position of an index in a block; None where it is elsewhere."""
    passed = 0
    for start, stop in block.box[dim]:
        if start <= index % block.full[dim] < stop:
            return passed + index % block.full[dim] - start
        passed += stop - start
    return None


def _selected(at, x, dim, index):
    place = _place(at.ins[0], dim, index)
    return x.new_zeros(at.outs[0].shape) if place is None else aten.select.int(x, dim, place)


@rule(aten.select.int, local=_selected)
def select(x, dim, index):
    """`out[i] = x[index, i]` along dim 0"""
    yield (P,), P
    dim %= x.ndim
    for d in range(x.ndim):
        yield (S(d),), P if d == dim else S(d - (d > dim))  # the rank that holds it, others zeros


def _select_backward(at, grad, input_sizes, dim, index):
    out, dim = at.outs[0], dim % len(input_sizes)
    place = _place(out, dim, index)
    if place is None:
        return grad.new_zeros(out.shape)
    return aten.select_backward.default(grad, out.shape, dim, place)


@rule(aten.select_backward.default, local=_select_backward)
def select_backward(grad, input_sizes, dim, index):
    """`out[index, i] = grad[i]` along dim 0, and 0 elsewhere"""
    yield (P,), P
    dim %= len(input_sizes)
    for d in range(len(input_sizes)):
        yield (R if d == dim else S(d - (d > dim)),), S(d)


def _select_scatter(at, x, src, dim, index):
    place = _place(at.ins[0], dim, index)
    return x.clone() if place is None else aten.select_scatter.default(x, src, dim, place)


@rule(aten.select_scatter.default, local=_select_scatter)
def select_scatter(x, src, dim, index):
    """`out[index, i] = src[i]` along dim 0, and `x` elsewhere"""
    yield (P, P), P
    dim %= x.ndim
    for d in range(x.ndim):
        yield (S(d), R if d == dim else S(d - (d > dim))), S(d)


def _margins(ndim: int, pad) -> dict[int, tuple[int, int]]:
    """What is added before and after each dim; `pad` counts from the last dim."""
    pairs = list(zip(pad[::2], pad[1::2]))
    return {ndim - 1 - i: pair for i, pair in enumerate(pairs) if pair != (0, 0)}


def _pad(at, x, pad, value=0):
    held, out = at.ins[0], at.outs[0]
    local = list(pad)
    for d, (before, _) in _margins(x.ndim, pad).items():
        if x.shape[d] == held.full[d] and out.shape[d] == out.full[d]:
            continue
        low, high = out.start[d] - before, out.stop[d] - before  # in indices of x
        start, stop = max(low, held.start[d]), min(high, held.stop[d])
        if out.shape[d] == 0 or stop < start:
            return x.new_full(out.shape, value)
        x = x.narrow(d, start - held.start[d], stop - start)
        local[2 * (x.ndim - 1 - d) : 2 * (x.ndim - d)] = start - low, high - stop
    return aten.constant_pad_nd.default(x, local, value)


@rule(aten.constant_pad_nd.default, local=_pad, contiguous=True)
def constant_pad(x, pad, value=0):
    """`out[before + i] = x[i]`, and `value` elsewhere"""
    if value == 0:
        yield (P,), P
    margins = _margins(x.ndim, pad)
    for d in range(x.ndim):
        if d in margins:
            before, after = margins[d]
            yield (S(d),), Window(d, x.shape[d], -before, x.shape[d] + after)
        else:
            yield (S(d),), S(d)
