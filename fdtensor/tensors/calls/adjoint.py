"""`Adjoint`: a program with its backward, as a differentiable function of values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.planner import plan
from fdtensor.programs.program import Program
from fdtensor.runtime.cotangents import cotangents_of
from fdtensor.runtime.interpreter import run
from fdtensor.runtime.replication import mark, mark_operands, watching
from fdtensor.runtime.runner import as_traced, runner_of

__all__ = ["Adjoint"]


@attrs.frozen(eq=False)
class Adjoint:
    """The forward and the backward of a function, for inputs of certain types."""

    forward: Program
    """Gives the outputs and then what the backward needs."""
    backward: Program
    """From `kept` inputs, what the forward gave for it and cotangents, to those of `wanted`."""
    out_types: tuple[TensorType, ...]
    kept: tuple[int, ...]
    """The inputs that the backward reads."""
    wanted: tuple[int, ...]
    """The inputs that have a derivative."""
    apart: frozenset[int]
    """Those of them from which none goes to an output after all, as what was detached."""
    others: tuple[tuple[int, TensorType], ...]
    """Those of them, by place, whose cotangent the backward gives in another type than this one."""
    through: tuple[int, ...]
    """The outputs that may have one."""
    still: frozenset[int]
    """Those of them that have none after all, such as what was detached."""
    again: Callable[[Sequence[Any], Sequence[Any], Any], Sequence[Any]]
    """The cotangents as a differentiable function of the inputs and cotangents."""
    local: bool
    """Whether it is a function of torch, and no derivative of any order moves anything: then torch
    takes them of the lines."""
    function: Callable[[], Any]
    """The plain function, which runs keep and this does not."""

    def runner(self, comm: Any) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """The outputs, as values with derivatives."""
        count = len(self.out_types)

        @functools.cache
        def halves() -> Any:
            return runner_of(self.forward, comm), runner_of(self.backward, comm)

        def run(values: Sequence[Any]) -> Sequence[Any]:
            if watching():
                mark_operands(values, self.forward.in_types, comm)
            leaves = _Run.apply(self, comm, halves(), len(values), *_flat(values, comm))
            return _grouped(leaves, count, comm)

        if self.local and _is_real(comm) and self.forward.mesh.position(comm.rank) is not None:
            function = as_traced(self.forward, comm)
            constants = [tensor for _, tensor in self.forward.constants]
            # what torch saves inside of a block has no type that could be told
            return lambda values: (
                run(values) if watching() else function(*values, *constants)[:count]
            )
        halves()
        return run


def _is_real(comm: Any) -> bool:
    return comm.rank is not None


def _flat(values: Sequence[Any], comm: Any) -> Sequence[torch.Tensor]:
    """The tensors of values, one value after the other."""
    if _is_real(comm):
        return values
    return [leaf for value in values for leaf in comm.leaves(value)]


def _grouped(flat: Any, count: int, comm: Any) -> Sequence[Any]:
    """The values that `_flat` has taken apart."""
    if _is_real(comm):
        return flat
    width = len(flat) // max(1, count)
    return [comm.value(list(flat[i * width : (i + 1) * width])) for i in range(count)]


_wanted_again: list[Any] = []
"""The functions whose derivatives are computed: those of higher order read them again."""


class _Run(torch.autograd.Function):
    """A program on the leaves of its values."""

    @staticmethod
    def forward(
        ctx: Any, adjoint: Adjoint, comm: Any, halves: Any, count: int, *flat: torch.Tensor
    ) -> Any:
        values = halves[0](_grouped(flat, count, comm))
        outs, rest = values[: len(adjoint.out_types)], values[len(adjoint.out_types) :]
        if watching():
            for value, type in zip(rest, adjoint.forward.out_types[len(outs) :], strict=True):
                mark(comm.leaves(value), type)
        ctx.it, ctx.comm, ctx.backward_half = adjoint, comm, halves[1]
        ctx.functions = (adjoint.function(), *_wanted_again)
        ctx.count, ctx.rest = count, len(rest)
        width = len(flat) // max(1, count)
        ctx.left = [cotangents_of(flat[adjoint.wanted[k] * width]) for k, _ in adjoint.others]
        ctx.save_for_backward(*flat, *_flat(rest, comm))
        leaves = tuple(_flat(outs, comm))
        if adjoint.still or len(adjoint.through) < len(outs):
            through, width = set(adjoint.through) - adjoint.still, len(leaves) // len(outs)
            quiet = [leaf for i, leaf in enumerate(leaves) if i // width not in through]
            ctx.mark_non_differentiable(*quiet)
        return leaves

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:  # type: ignore[override]
        adjoint, comm, saved = ctx.it, ctx.comm, ctx.saved_tensors
        parts = _grouped(saved, ctx.count + ctx.rest, comm)
        values, rest = parts[: ctx.count], parts[ctx.count :]
        cts = _grouped(cotangents, len(adjoint.out_types), comm)
        cts = [cts[i] for i in adjoint.through]
        if torch.is_grad_enabled():
            before = len(_wanted_again)
            _wanted_again.extend(ctx.functions)
            try:
                grads = adjoint.again(values, cts, comm)
            finally:
                del _wanted_again[before:]
        else:
            grads = ctx.backward_half([*(values[i] for i in adjoint.kept), *rest, *cts])
            if adjoint.others:
                grads = _left(ctx, grads)
        by_input = dict(zip(adjoint.wanted, grads, strict=True))
        flat: list[Any] = [None, None, None, None]
        for i, value in enumerate(values):
            leaves = comm.leaves(value)
            grad = None if i in adjoint.apart else by_input.get(i)
            flat += [None] * len(leaves) if grad is None else comm.leaves(grad)
        return tuple(flat)


def _left(ctx: Any, grads: Sequence[Any]) -> list[Any]:
    """The cotangents, but for those that were left to what collects them."""
    adjoint, comm, given = ctx.it, ctx.comm, [*grads]
    for (k, own), cotangents in zip(adjoint.others, ctx.left, strict=True):
        type = adjoint.backward.out_types[k]
        if cotangents is None or cotangents.is_closed:
            given[k] = run(plan(type, own, cost=comm.cost), grads[k], comm)
            continue
        leaves, first = comm.leaves(grads[k]), 4 + adjoint.wanted[k] * comm.width(type)
        if any(ctx.needs_input_grad[first : first + len(leaves)]):
            cotangents.add(type, leaves)
        given[k] = None
    return given
