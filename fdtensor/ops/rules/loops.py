"""What a loop carries keeps its layout from step to step; all ranks have its predicate alike."""

from __future__ import annotations

from fdtensor.ops.loop_ops import ENTRY, LOOP_IN, LOOP_NEXT, LOOP_OUT, WITH_ENTRY
from fdtensor.ops.notation.core import P, R, S, rule


@rule(LOOP_IN)
def loop_in(x, steps, loop):
    """`out, tie = x`"""
    yield (P,), (P, P)
    for d in range(x.ndim):
        yield (S(d),), (S(d), S(d))


@rule(LOOP_NEXT)
def loop_next(go, next, tie, loop):
    """`out = next` in the next step, where `go`"""
    yield (R, P, P), R
    for d in range(tie.ndim):
        yield (R, S(d), S(d)), R


@rule(LOOP_OUT)
def loop_out(tie, tokens, loop):
    """`out = tie` of the last step"""
    ready = (R,) * len(tokens)
    yield (P, *ready), P
    for d in range(tie.ndim):
        yield (S(d), *ready), S(d)


@rule(ENTRY)
def entry(stack, i):
    """`out = stack[i]`"""
    yield (P, R), P
    for d in range(1, stack.ndim):
        yield (S(d), R), S(d - 1)


@rule(WITH_ENTRY)
def with_entry(stack, entry, i):
    """`out = stack`, but `out[i] = entry`"""
    yield (P, P, R), P
    for d in range(1, stack.ndim):
        yield (S(d), S(d - 1), R), S(d)
