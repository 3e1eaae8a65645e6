"""Ops on a dim that has an entry for each rank along an axis."""

from __future__ import annotations

import torch

from fdtensor.ops.notation.core import Entries, P, R, S, rule
from fdtensor.ops.notation.runs import needed, taken
from fdtensor.ops.rank_dims import FIRST, PERMUTED, SAME
from fdtensor.ops.rules.views import placed

aten = torch.ops.aten


def _same(at, x, dim):
    """Any entry of those that this rank holds."""
    return aten.clone.default(aten.select.int(x, dim, 0))


@rule(SAME, local=_same)
def same(x, dim):
    """`out = x[i]`, which is the same for all `i`"""
    yield (Entries(dim),), R
    yield (P,), P
    for d in range(x.ndim):
        if d != dim:
            yield (S(d),), S(d - (d > dim))


def _first(at, x, dim, count):
    """The operand, or its term on this rank, as the first of the entries that this rank holds."""
    size, row = at.outs[0].shape[dim], aten.unsqueeze.default(x, dim)
    if size == 1:
        return aten.clone.default(row)
    return torch.cat([row, x.new_zeros((*x.shape[:dim], size - 1, *x.shape[dim:]))], dim)


@rule(FIRST, local=_first)
def first(x, dim, count):
    """`out[i] = x if i == 0 else 0`, or terms of `x`: the entries add up to it"""
    yield (P,), Entries(dim)
    yield (P,), P
    for d in range(x.ndim):
        yield (S(d),), S(d + (d >= dim))


def _runs(dim, sources):
    return {dim: [range(i, i + 1) for i in sources]}


def _permuted(at, x, dim, sources):
    for d, runs in _runs(dim, sources).items():
        x = taken(x, d, at.ins[0].box[d], at.outs[0].box[d], runs)
    return aten.clone.default(x)


@rule(PERMUTED, local=_permuted)
def permuted(x, dim, sources):
    """`out[i] = x[sources[i]]`"""
    runs = _runs(dim, sources)
    yield from placed(range(x.ndim), {d: needed(d, runs[d]) for d in runs})
