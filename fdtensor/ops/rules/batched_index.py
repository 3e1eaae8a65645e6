"""Entries of a batch of tensors at indices of their own."""

from __future__ import annotations

from fdtensor.ops.batched_index import ADDED, COPIED, TAKEN
from fdtensor.ops.notation.core import P, R, S, rule


@rule(TAKEN)
def taken(self, index, wraps):
    """`out[b, i] = self[b, index[b, i]]`"""
    yield (S(0), S(0)), S(0)
    yield (R, S(1)), S(1)
    yield (P, R), P
    for d in range(2, self.ndim):
        yield (S(d), R), S(d)


@rule(ADDED)
def added(self, index, source, wraps):
    """`out[b, j] = self[b, j] + sum_i source[b, i] * (index[b, i] == j)`"""
    yield (S(0), S(0), S(0)), S(0)
    yield (P, S(1), S(1)), P
    yield (P, R, P), P
    for d in range(2, self.ndim):
        yield (S(d), R, S(d)), S(d)


@rule(COPIED)
def copied(self, index, source, wraps):
    """`out[b, index[b, i]] = source[b, i]`, and `self` elsewhere"""
    yield (S(0), S(0), S(0)), S(0)
    yield (P, R, P), P
    for d in range(2, self.ndim):
        yield (S(d), R, S(d)), S(d)
