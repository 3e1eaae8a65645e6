"""Random numbers: each rank draws those of its block."""

from __future__ import annotations

from fdtensor.ops.notation.core import R, S, rule
from fdtensor.ops.randomness.draw import DRAW, boxed


def _block(at, key, stream, kind, ends, size, dtype, box=()):
    return DRAW(key, stream, kind, ends, size, dtype, boxed(at.outs[0].box))


@rule(DRAW, local=_block)
def draw(key, stream, kind, ends, size, *_):
    """`out[i] = f(key, stream, i)`"""
    for d in range(len(size)):
        yield (R,), S(d)
