"""Entries at indices of which some count their dim: a block of it needs that block of the others.

A dim that is counted is cut as its index is, or not at all.
"""

from __future__ import annotations

import torch

from fdtensor.ops.counted_index import LOOKED_UP, PUT, along
from fdtensor.ops.notation.core import P, R, S, rule
from fdtensor.ops.rules.gather import MOVED
from fdtensor.ops.rules.index import look_ups, put_at, taken


def _of_block(x, indices, counting):
    """The indices, of which those that count a dim count that of the block."""
    for k in counting:
        count = torch.arange(x.shape[k], dtype=indices[k].dtype, device=x.device)
        indices[k] = count.reshape(indices[k].shape)
    return indices


def _look_up(at, x, indices, counting):
    return taken(at, x, _of_block(x, indices, counting), counting)


def _write(at, x, indices, values, accumulate, counting):
    return put_at(at, x, _of_block(x, indices, counting), values, accumulate, counting)


def _rows(x, indices, counting, *beside):
    """Cuts of `x`, of each index, of operands beside, and of the result: `look_ups`."""
    dims = [k for k, index in enumerate(indices) if index is not None]
    counted = {along(indices[k]): k for k in counting}
    for of_x, cuts, others, out in look_ups(x, indices, *beside):
        if of_x == R:
            pairs = zip(dims, cuts, strict=True)
            place = next(c.dim - indices[k].ndim for k, c in pairs if isinstance(c, S))
            of_x = S(counted[place]) if place in counted else R
        yield of_x, cuts, others, out


@rule(LOOKED_UP, local=_look_up)
def looked_up(self, indices, counting):
    """`out[b, i] = self[b, index[b, i]]`"""
    dims = [k for k, index in enumerate(indices) if index is not None]
    rest = [R] * len(dims)
    for of_x, cuts, _, out in _rows(self, indices, counting):
        yield (of_x, *cuts), out
    for d in dims:
        if d not in counting:
            yield (S(d), *rest), P
    for p in MOVED:
        yield (p, *rest), p


@rule(PUT, local=_write)
def put(self, indices, values, accumulate, counting):
    """`out[b, index[b, i]] = values[b, i]`, or that added to `self`, and `self` elsewhere"""
    dims = [k for k, index in enumerate(indices) if index is not None]
    rest = [R] * len(dims)
    for of_x, cuts, others, _ in _rows(self, indices, counting, values):
        if of_x != R:
            yield (of_x, *cuts, *others), of_x
        elif accumulate:
            yield (P, *cuts, *others), P
    for d in dims:
        if d not in counting:
            yield (S(d), *rest, R), S(d)
    for p in (P,) if accumulate else MOVED:
        yield (p, *rest, p), p
