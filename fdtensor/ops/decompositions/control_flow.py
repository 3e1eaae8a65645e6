"""Control flow of torch in a traced function: branches of which one counts, and unrolled loops."""

from __future__ import annotations

import contextlib
import functools
from contextvars import ContextVar

import torch

from fdtensor.layouts.callsite import user_line, warn_user
from fdtensor.layouts.errors import FallbackWarning
from fdtensor.layouts.torch_private import associative_rounds
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.ops.branches import selected
from fdtensor.ops.loops import looped
from fdtensor.ops.scan_steps import refuse_different
from fdtensor.ops.scans import scanned
from fdtensor.ops.transparent import recorded_as

__all__ = ["MANY", "in_turn", "over_entries", "unrolled"]

MANY = 128
"""The steps of a scan from which on it is told that each has lines of its own."""

_of = torch.ops.higher_order


@recorded_as(_of.cond)
def cond(pred, true_fn, false_fn, operands=()):
    """`out = pred ? true : false`; a program has the lines of both, and runs those of one."""
    if not isinstance(pred, torch.Tensor):
        return (true_fn if pred else false_fn)(*operands)
    which = pred if pred.dtype == torch.bool else pred != 0
    which = which.reshape(()) if which.ndim else which
    return selected(which, (true_fn, false_fn), operands)


@recorded_as(_of.scan)
def scan(combine_fn, init, xs, additional_inputs=()):
    """`carry, y[i] = combine(carry, x[i])`: the carries, then the stacked results."""
    trees = []

    def step(carry, entries):
        outs, tree = flatten(combine_fn(*carry, *entries, *additional_inputs))
        trees[:] = [tree]
        return outs[: len(carry)], outs[len(carry) :]

    carry, results = over_entries(step, [*init], [*xs], xs[0].shape[0])
    return unflatten(trees[0], [*carry, *results])


_UNROLLED: ContextVar[bool] = ContextVar("unrolled", default=False)


@contextlib.contextmanager
def unrolled():
    """A context in which scans have lines for each step."""
    token = _UNROLLED.set(True)
    try:
        yield
    finally:
        _UNROLLED.reset(token)


def over_entries(step, carry, stacks, count, from_end=False):
    """What a scan carries in the end, and its stacked results: as a loop where it can be one.

    A step that draws random numbers has lines for each entry, since it draws others each time; so
    has one whose collectives are those of a `shard_map` around.
    """
    folded = None if _UNROLLED.get() else scanned(step, carry, stacks, count, from_end=from_end)
    if folded is not None:
        return folded
    if count >= MANY:
        which = "in a shard_map" if _UNROLLED.get() else "that draws random numbers"
        _told(f"a scan {which} has {count} steps, and lines for each of them")
    return in_turn(step, carry, stacks, count, from_end)


def in_turn(step, carry, stacks, count, from_end=False):
    """What a scan carries in the end, and its stacked results, one step after the other."""
    entries = [stack.unbind(0) for stack in stacks]
    if not count:  # of a step that does not count come the types of the results
        _, results = step([t.clone() for t in carry], [t.new_zeros(t.shape[1:]) for t in stacks])
        return carry, [t.new_zeros((0, *t.shape)) for t in results]
    results = [()] * count
    for i in reversed(range(count)) if from_end else range(count):
        after, results[i] = step(carry, [entry[i] for entry in entries])
        refuse_different(carry, after)
        carry = after
    return carry, [torch.stack(some) for some in zip(*results, strict=True)]


@recorded_as(_of.map_impl)
def mapped(f, xs, pos_args=()):
    """`out[i] = f(x[i])`, for all i at once where each op of `f` can be, else one by one."""
    dims = *[0] * len(xs), *[None] * len(pos_args)
    try:
        return torch.vmap(f, dims)(*xs, *pos_args)
    except (RuntimeError, NotImplementedError, ValueError):  # an op without a batching rule
        _told("torch.map runs entry by entry: an op of its function does not run on all at once")
        each = [flatten(f(*[x[i] for x in xs], *pos_args)) for i in range(xs[0].shape[0])]
        stacked = [torch.stack(step) for step in zip(*(leaves for leaves, _ in each), strict=True)]
        return unflatten(each[0][1], stacked)


@recorded_as(_of.associative_scan)
def associative_scan(combine_fn, xs, additional_inputs=()):
    """`out[i] = x[0] * ... * x[i]`, in as many rounds as the count has binary digits."""
    one = functools.partial(_combined, combine_fn, len(xs), additional_inputs)
    return associative_rounds(one, xs)


def _combined(combine_fn, count, more, *args):
    dims = *[0] * (2 * count), *[None] * len(more)
    return torch.vmap(lambda *a: tuple(combine_fn(*a)), dims)(*args, *more)


@recorded_as(_of.while_loop)
def while_loop(cond_fn, body_fn, carried_inputs, additional_inputs=()):
    """`x = step(x)` while `cond(x)`; a program has the lines of a step once."""
    return looped(cond_fn, body_fn, carried_inputs, additional_inputs)


def _told(text):
    """Says, with the line of the user, what a loop costs."""
    warn_user(f"{text} ({user_line() or 'not known'})", FallbackWarning)
