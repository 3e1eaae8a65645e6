"""Checks of the values of operands: each rank checks its block."""

from __future__ import annotations

from fdtensor.ops.notation.core import P, S, rule
from fdtensor.ops.value_checks import BOUNDED, CHECK


@rule(BOUNDED)
def bounded(x, low, high, ignored, fault):
    """`out[i] = x[i] if low <= x[i] < high else low`, `count = sum_i (out[i] != x[i])`"""
    for d in range(x.ndim):
        yield (S(d),), (S(d), P)


@rule(CHECK)
def check(counts, faults):
    """Raises unless `counts[k] == 0`"""
    return ()
