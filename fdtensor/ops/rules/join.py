"""Ops that join tensors, split them, or change the order of their entries."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from fdtensor.layouts.blocks import length
from fdtensor.layouts.placement import StridedShard
from fdtensor.ops.notation.core import Halo, P, R, S, Window
from fdtensor.ops.notation.local_index import subset
from fdtensor.ops.notation.ops import on
from fdtensor.ops.notation.runs import needed, taken
from fdtensor.ops.rules.views import placed

aten = torch.ops.aten


def _joined(ndim, dim, sizes):
    """The placements of a tensor, each with those of the pieces of these sizes along `dim`."""
    dim, total = dim % ndim, sum(sizes)
    yield P, (P,) * len(sizes)
    for d in range(ndim):
        if d != dim:
            yield S(d), (S(d),) * len(sizes)
    ends = pairwise(accumulate(sizes, initial=0))
    yield S(dim), tuple(Window(dim, total, start, stop) for start, stop in ends)
    if len(sizes) > 1 and len(set(sizes)) == 1:
        yield StridedShard(dim, len(sizes)), (S(dim),) * len(sizes)  # a rank's part of each piece


@on("cat")
def cat(tensors, dim=0):
    """`out[i] = a[i]` for `i < len(a)`, then `out[len(a) + i] = b[i]`"""
    kept = [i for i, t in enumerate(tensors) if t.shape != (0,)]  # others join with anything
    if not kept:  # all of them join along any dim
        kept, dim = list(range(len(tensors))), 0
    sizes = [tensors[i].shape[dim] for i in kept]
    for whole, pieces in _joined(tensors[kept[0]].ndim, dim, sizes):
        placed = dict(zip(kept, pieces, strict=True))
        yield tuple(placed.get(i, R) for i in range(len(tensors))), whole
    largest = max(range(len(sizes)), key=lambda k: sizes[k])
    if 2 * sizes[largest] > sum(sizes) > sizes[largest]:
        whole, *pieces = _around(dim % tensors[kept[0]].ndim, sizes, largest)
        placed = dict(zip(kept, pieces, strict=True))
        yield tuple(placed.get(i, R) for i in range(len(tensors))), whole


def _around(dim: int, sizes: list[int], k: int) -> list[Window]:
    """The placements of a tensor and its pieces where piece `k` stays as it is cut.

    Those before it are with its first block, those after it with the last one.
    """
    stops = [*accumulate(sizes)]
    start = stops[k] - sizes[k]
    ends = [(0, stops[-1]), *pairwise((0, *stops))]
    return [Window(dim, sizes[k], a - start, b - start, beside=True) for a, b in ends]


@on("stack")
def stack(tensors, dim=0):
    """`out[k, i] = tensors[k][i]`"""
    yield (P,) * len(tensors), P
    ndim = tensors[0].ndim
    for d in range(ndim):
        yield (S(d),) * len(tensors), S(d + (d >= dim % (ndim + 1)))


def _sizes(size: int, pieces) -> list[int]:
    """The sizes of pieces of a dim, from one size for all or a list."""
    if isinstance(pieces, (list, tuple)):
        return list(pieces)
    return [min(pieces, size - start) for start in range(0, size, pieces)] if size else [0]


def _split(at, x, pieces, dim=0):
    full, held = at.ins[0].full[dim], at.ins[0].box[dim]
    sizes = _sizes(full, pieces)
    if x.shape[dim] == full:
        return aten.split_with_sizes.default(x, sizes, dim)
    ends = pairwise(accumulate(sizes, initial=0))
    return [subset(x, dim % x.ndim, held, ((a, b),) if a < b else ()) for a, b in ends]


@on("split.Tensor unsafe_split.Tensor split_copy.Tensor", local=_split)
@on("split_with_sizes unsafe_split_with_sizes split_with_sizes_copy", local=_split)
def split(x, sizes, dim=0):
    """`outs[k][i] = x[sum(sizes[:k]) + i]`"""
    for whole, pieces in _joined(x.ndim, dim, _sizes(x.shape[dim], sizes)):
        yield (whole,), pieces


def _moved(runs_of):
    """The local computation of a reordering: a rank reorders its block, dim after dim."""

    def local(at, x, *args):
        for d, runs in runs_of(at.ins[0].full, *args).items():
            x = taken(x, d, at.ins[0].box[d], at.outs[0].box[d], runs)
        return x

    return local


def _moves(x, runs):
    yield from placed(range(x.ndim), {d: needed(d, runs[d]) for d in runs})


def _turned(shape, dims):
    return {d % len(shape): [range(shape[d] - 1, -1, -1)] for d in dims if shape}


@on("flip", local=_moved(_turned))
def flip(x, dims):
    """`out[i] = x[n - 1 - i]`"""
    yield from _moves(x, _turned(x.shape, dims))


def _rolled(shape, shifts, dims=()):
    total: dict[int, int] = {}
    for shift, d in zip(shifts, dims or (0,), strict=True):
        total[d % len(shape)] = total.get(d % len(shape), 0) + shift
    starts = {d: -shift % max(1, shape[d]) for d, shift in total.items()}
    return {d: [range(k, shape[d]), range(k)] for d, k in starts.items()}


@on("roll", local=_moved(_rolled))
def roll(x, shifts, dims=()):
    """`out[i] = x[(i - shift) % n]`"""
    if dims or x.ndim == 1:
        yield from _moves(x, _rolled(x.shape, shifts, dims))
    else:  # it rolls the flat tensor
        yield (P,), P


def _repeated(at, x, repeats):
    new = len(repeats) - x.ndim
    return aten.repeat.default(x, [*at.outs[0].shape[:new], *repeats[new:]])


@on("repeat", local=_repeated)
def repeat(x, repeats):
    """`out[k, i] = x[i % n]`"""
    new = len(repeats) - x.ndim
    order = [d if repeats[new + d] == 1 else None for d in range(x.ndim)]
    yield from placed([None] * new + order, dict.fromkeys(range(new), R))


def _unfold(at, x, dim, size, step):
    dim %= x.ndim
    ((start, stop),) = at.outs[0].box[dim] or ((0, 0),)
    if start == stop:
        return x.new_zeros(at.outs[0].shape)
    x = subset(x, dim, at.ins[0].box[dim], ((start * step, (stop - 1) * step + size),))
    return aten.unfold.default(x, dim, size, step)


@on("unfold unfold_copy", local=_unfold, contiguous=True)
def unfold(x, dim, size, step):
    """`out[i, j] = x[i * step + j]` along the dim, with `j` as the last"""
    dim %= max(1, x.ndim)
    count = (x.shape[dim] - size) // step + 1 if x.ndim else 1
    read = Halo(dim, count, lambda a, b: (a * step, (b - 1) * step + size))
    yield from placed(range(x.ndim), {dim: read})


def _reaching(start: int, stop: int, size: int, step: int) -> tuple[int, int]:
    """The windows that reach into a range."""
    return max(0, -(-(start - size + 1) // step)), -(-stop // step)


def _unfold_backward(at, grad, input_sizes, dim, size, step):
    out, dim = at.outs[0], dim % len(input_sizes)
    start, stop = out.start[dim], out.stop[dim]
    first, last = _reaching(start, stop, size, step)
    last = min(last, at.ins[0].full[dim])
    if not length(out.box[dim]) or first >= last:
        return grad.new_zeros(out.shape)
    grad = subset(grad, dim, at.ins[0].box[dim], ((first, last),))
    low, high = first * step, (last - 1) * step + size  # what these windows cover
    shape = [high - low if d == dim else n for d, n in enumerate(out.shape)]
    covered = aten.unfold_backward.default(grad, shape, dim, size, step)
    beside = [0, 0] * (len(shape) - 1 - dim)
    return aten.constant_pad_nd.default(covered, [*beside, low - start, stop - high])


@on("unfold_backward", local=_unfold_backward, contiguous=True)
def unfold_backward(grad, input_sizes, dim, size, step):
    """`out[k] = sum_(i, j) grad[i, j] * (i * step + j == k)`"""
    dim %= max(1, len(input_sizes))
    count = input_sizes[dim] if input_sizes else 1
    read = Halo(dim, count, lambda a, b: _reaching(a, b, size, step))
    yield from placed(range(len(input_sizes)), {dim: read})
