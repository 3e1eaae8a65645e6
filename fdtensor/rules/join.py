"""Ops that put tensors together, take them apart, or say them in another order."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from fdtensor.rules.core import P, R, S, Window, rule
from fdtensor.rules.held import part

aten = torch.ops.aten


@rule(aten.cat.default)
def cat(tensors, dim=0):
    """`out[i] = a[i]` for `i < len(a)`, then `out[len(a) + i] = b[i]`"""
    empty = [t.shape == (0,) for t in tensors]  # joins with anything
    yield tuple(R if e else P for e in empty), P
    first = next((t for t, e in zip(tensors, empty) if not e), tensors[0])
    dim %= first.ndim
    for d in range(first.ndim):
        if d != dim:
            yield tuple(R if e else S(d) for e in empty), S(d)
    ends = [0]
    for t, e in zip(tensors, empty):
        ends.append(ends[-1] + (0 if e else t.shape[dim]))
    cuts = [Window(dim, ends[-1], start, stop) for start, stop in pairwise(ends)]
    yield tuple(R if e else cut for e, cut in zip(empty, cuts)), S(dim)


@rule(aten.stack.default)
def stack(tensors, dim=0):
    """`out[k, i] = tensors[k][i]`"""
    yield (P,) * len(tensors), P
    ndim = tensors[0].ndim
    dim %= ndim + 1
    for d in range(ndim):
        yield (S(d),) * len(tensors), S(d + (d >= dim))


def _ends(size, pieces) -> list[int]:
    """Where pieces start and stop, all of one size or each of its own."""
    if isinstance(pieces, (list, tuple)):
        return [0, *accumulate(pieces)]
    return [*range(0, size, pieces), size] if size else [0, 0]


def _pieces(op):
    """A rank takes of each piece what it holds."""

    def local(at, x, pieces, dim=0):
        dim %= x.ndim
        full, held = at.ins[0].full[dim], at.ins[0].box[dim]
        if x.shape[dim] == full:
            return op(x, pieces, dim)
        ends = _ends(full, pieces)
        return [part(x, dim, held, ((a, b),) if a < b else ()) for a, b in pairwise(ends)]

    return local


def _split(x, pieces, dim):
    dim %= x.ndim
    size = x.shape[dim]
    ends = _ends(size, pieces)
    cuts = [Window(dim, size, start, stop) for start, stop in pairwise(ends)]
    yield (P,), (P,) * len(cuts)
    for d in range(x.ndim):
        yield (S(d),), tuple(cuts) if d == dim else (S(d),) * len(cuts)


@rule(aten.split.Tensor, aten.unsafe_split.Tensor, local=_pieces(aten.split.Tensor))
def split(x, split_size, dim=0):
    """`outs[k][i] = x[k * split_size + i]`"""
    yield from _split(x, split_size, dim)


@rule(
    aten.split_with_sizes.default,
    aten.unsafe_split_with_sizes.default,
    local=_pieces(aten.split_with_sizes.default),
)
def split_with_sizes(x, split_sizes, dim=0):
    """`outs[k][i] = x[sum(split_sizes[:k]) + i]`"""
    yield from _split(x, split_sizes, dim)


@rule(aten.unbind.int)
def unbind(x, dim=0):
    """`outs[k][i] = x[k, i]`"""
    dim %= x.ndim
    count = x.shape[dim]
    yield (P,), (P,) * count
    for d in range(x.ndim):
        if d != dim:
            yield (S(d),), (S(d - (d > dim)),) * count


@rule(aten.flip.default)
def flip(x, dims):
    """`out[i] = x[n - 1 - i]`"""
    yield (P,), P
    turned = {d % x.ndim for d in dims}
    for d in range(x.ndim):
        if d not in turned:
            yield (S(d),), S(d)


@rule(aten.roll.default)
def roll(x, shifts, dims=()):
    """`out[i] = x[(i - shift) % n]`"""
    yield (P,), P
    turned = {d % x.ndim for d in dims} if dims and x.ndim else set(range(x.ndim))
    for d in range(x.ndim):
        if d not in turned:
            yield (S(d),), S(d)


def _repeated(at, x, repeats):
    """Repeats of what is one, or new, by what this rank holds of the output."""
    new = len(repeats) - x.ndim
    counts = [
        shown if d < new or at.ins[0].full[d - new] == 1 else n
        for d, (n, shown) in enumerate(zip(repeats, at.outs[0].shape))
    ]
    return aten.repeat.default(x, counts)


@rule(aten.repeat.default, local=_repeated)
def repeat(x, repeats):
    """`out[k, i] = x[i % n]`"""
    yield (P,), P
    new = len(repeats) - x.ndim
    for d, n in enumerate(repeats):
        if d >= new and n == 1:
            yield (S(d - new),), S(d)
        elif d < new or x.shape[d - new] == 1:
            yield (R,), S(d)


@rule(aten.unfold.default)
def unfold(x, dimension, size, step):
    """`out[i, j] = x[i * step + j]` along the dim, with `j` as the last"""
    yield (P,), P
    for d in range(x.ndim):
        if d != dimension % x.ndim:
            yield (S(d),), S(d)


@rule(aten.unfold_backward.default, sizes={"input_sizes": 0})
def unfold_backward(grad, input_sizes, dim, size, step):
    """`out[k] = sum_(i, j) grad[i, j] * (i * step + j == k)`"""
    yield (P,), P
    for d in range(len(input_sizes)):
        if d != dim % len(input_sizes):
            yield (S(d),), S(d)
