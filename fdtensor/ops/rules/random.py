"""Random numbers: each rank draws those of its block."""

from __future__ import annotations

from fdtensor.ops.notation.core import R, S, rule
from fdtensor.ops.random_bits.threefry import HASH
from fdtensor.ops.randomness.draw import DRAW, boxed
from fdtensor.ops.rules.pointwise import broadcast


def _block(at, key, stream, kind, ends, size, dtype, box=()):
    return DRAW(key, stream, kind, ends, size, dtype, boxed(at.outs[0].box[key.dim() - 1 :]))


@rule(DRAW, local=_block)
def draw(key, stream, kind, ends, size, *_):
    """`out[b, i] = f(key[b], stream, i)`"""
    for d in range(key.ndim - 1):
        yield (S(d),), S(d)
    for d in range(len(size)):
        yield (R,), S(key.ndim - 1 + d)


@rule(HASH)
def hashed(*words):
    """`out[i], other[i] = f(high[i], low[i], counter[i], count[i])`"""
    yield from broadcast(words, outs=2)
