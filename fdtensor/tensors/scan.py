"""`scan`: a function that runs for one entry of its arguments after the other, recorded once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.tree import argument, flatten, paths, unflatten
from fdtensor.layouts.words import shown
from fdtensor.ops.around import noted
from fdtensor.ops.decompositions.control_flow import in_turn, over_entries
from fdtensor.ops.loops import with_tensors
from fdtensor.ops.transparent import recording
from fdtensor.tensors.call import call
from fdtensor.tensors.dtensor import is_dtensor

__all__ = ["scan"]


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """`carry, ys[i] = f(carry, xs[i])` for one entry after the other, as the scan of JAX.

    `init` and `xs` are pytrees of tensors; each of `xs` has the entries along its first dim. With
    `reverse` the last entry is the first one; `length` says how many steps there are, for `xs` that
    are None. Returns what is carried in the end, and the stacked results, which may be None.

    In a traced function it is a loop: the lines of `f` are there once, its layouts are chosen once,
    and what all steps read alike is moved before them. The program takes as long to trace as one
    step. Derivatives are loops too; they read the values that forward steps have kept, or compute
    those again that `torch.utils.checkpoint` in `f` does not keep, where a loss calls `backward()`
    (the transforms of `torch.func` do not take its hooks). Functions that draw random numbers have
    lines for each step.

    Raises `TraceError` where a step gives another type of carry than it takes.

    >>> mesh = Mesh(dp=2, tp=2)
    >>> comm = SimulatedComm(mesh)
    >>> weights = distribute(torch.full((12, 4, 4), 0.25), mesh.layout(None, None, "tp"), comm)
    >>> x = distribute(torch.arange(8.0).view(2, 4), mesh.layout("dp"), comm)
    >>> @spmd
    ... def deep(x, weights):
    ...     return fd.scan(lambda h, w: (h @ w, None), x, weights)[0]
    >>> deep(x, weights).full()
    tensor([[1.5000, 1.5000, 1.5000, 1.5000],
            [5.5000, 5.5000, 5.5000, 5.5000]])
    """
    carried, stacked = flatten(init, is_leaf=is_dtensor)[0], flatten(xs, is_leaf=is_dtensor)[0]
    if any(map(is_dtensor, (*carried, *stacked))):
        return call(functools.partial(scan, f, length=length, reverse=reverse), init, xs)
    count = _count(xs, length)
    (carry, spec), (stacks, of_entries) = flatten(init), flatten(xs)
    trees: list[Any] = []

    def step(carry: list[Any], entries: list[Any]) -> tuple[list[Any], list[Any]]:
        out = f(unflatten(spec, carry), unflatten(of_entries, entries))
        if not isinstance(out, tuple) or len(out) != 2:
            raise TraceError(
                f"a step of scan gives {shown(out)}, and no pair of a carry and a result.",
                hint="Return (carry, y), with None for y where there is none.",
            )
        (after, tree), (results, of_results) = flatten(out[0]), flatten(out[1])
        if tree != spec:
            raise TraceError(
                "a step of scan gives another structure of carry than it took.",
                took=shown(spec),
                gave=shown(tree),
                hint="Return a carry of the structure of init.",
            )
        trees[:] = [of_results]
        return with_tensors(after, "scan"), with_tensors(results, "scan")

    carry, over = with_tensors(carry, "scan"), in_turn
    if recording():  # by an op, so that a function around this one may put its own in their place
        carry, stacks, over = [t.clone() for t in carry], [t.clone() for t in stacks], over_entries
    after, results = over(step, carry, stacks, count, reverse)
    return unflatten(spec, noted(after)), unflatten(trees[0], noted(results))


def _count(xs: Any, length: int | None) -> int:
    """How many steps there are."""
    stacks, spec = flatten(xs)
    names = list(map(argument, paths(spec, "xs")))
    for name, t in zip(names, stacks, strict=True):
        if not isinstance(t, torch.Tensor) or not t.ndim:
            raise TraceError(
                f"{name} of scan is {shown(t)}, which has no entries.",
                hint="Each leaf of xs is a tensor with the entries along its first dim.",
            )
    counts = {name: t.shape[0] for name, t in zip(names, stacks, strict=True)}
    if length is not None:
        counts["length"] = length
    if len(set(counts.values())) != 1:
        told = "no xs and no length" if not counts else "other numbers of entries"
        raise TraceError(
            f"scan has {told}.",
            **counts,
            hint="All leaves of xs have as many entries; without xs, say length=.",
        )
    return next(iter(counts.values()))
