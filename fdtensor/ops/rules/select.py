"""One of two tensors, by a predicate that all ranks have alike."""

from __future__ import annotations

from fdtensor.ops.notation.core import P, R, S, rule
from fdtensor.ops.select import SELECT


@rule(SELECT)
def select(which, a, b):
    """`out = which ? a : b`"""
    yield (R, P, P), P
    for d in range(a.ndim):
        yield (R, S(d), S(d)), S(d)
