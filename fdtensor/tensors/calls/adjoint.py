"""`Adjoint`: a program with its backward, as a differentiable function of values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import version_of
from fdtensor.plans.local_tensors import empty
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
    part: Callable[[frozenset[int]], Adjoint | None]
    """The same for some of the outputs, where the others have no cotangent; None without wanted
    inputs."""
    refused: Mapping[int, TraceError]
    """The outputs that torch takes no derivative of: what a cotangent of each raises."""

    def _some_rank_is_empty(self) -> bool:
        """Whether a rank holds nothing of a tensor: some ops of torch give that no derivative."""
        types = [t for t in {*self.forward.in_types, *self.out_types} if 0 not in t.shape]
        return any(0 in t.local_shape(rank) for t in types for rank in t.mesh.order)

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """The outputs that derivatives come from."""
        return frozenset(self.through) - self.still

    def runner(self, comm: Any) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """The outputs, as values with derivatives."""
        count, ways = len(self.out_types), _Ways(self, comm)

        def run(values: Sequence[Any]) -> Sequence[Any]:
            if watching():
                mark_operands(values, self.forward.in_types, comm)
            leaves = _Run.apply(ways, ways.usual(), comm, len(values), *_flat(values, comm))
            return _grouped(leaves, count, comm)

        inside = _is_real(comm) and self.forward.mesh.position(comm.rank) is not None
        if self.local and inside and not self._some_rank_is_empty():
            function = as_traced(self.forward, comm)
            constants = [tensor for _, tensor in self.forward.constants]
            # what torch saves inside of a block has no type that could be told
            return lambda values: (
                run(values) if watching() else function(*values, *constants)[:count]
            )
        ways.usual()
        return run


@attrs.frozen(eq=False)
class _Way:
    """An adjoint, with what runs its halves on a Comm."""

    adjoint: Adjoint
    forward: Callable[[Sequence[Any]], Sequence[Any]]
    backward: Callable[[Sequence[Any]], Sequence[Any]]


class _Ways:
    """The adjoint of a function on a Comm, and those for some of its outputs.

    A cotangent that does not come is none of zeros, whose way back may be infinite: `0 * inf`. So a
    backward from other outputs than the forward was to serve runs a forward of its own, and the
    next forward serves those.
    """

    def __init__(self, whole: Adjoint, comm: Any) -> None:
        self.whole, self._comm = whole, comm
        self._known: dict[frozenset[int], _Way | None] = {}
        self._last = whole.ends

    def usual(self) -> _Way:
        """The way for the outputs that the last backward came from, at first for all."""
        way = self.of(self._last)
        assert way is not None
        return way

    def of(self, ends: frozenset[int]) -> _Way | None:
        """The way for these outputs; None where no input has a derivative from them."""
        if ends not in self._known:
            adjoint = self.whole if ends == self.whole.ends else self.whole.part(ends)
            self._known[ends] = adjoint and _Way(
                adjoint,
                runner_of(adjoint.forward, self._comm),
                runner_of(adjoint.backward, self._comm),
            )
        way = self._known[ends]
        if way is not None:
            self._last = ends
        return way


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
        ctx: Any, ways: _Ways, way: _Way, comm: Any, count: int, *flat: torch.Tensor
    ) -> Any:
        types, values = way.adjoint.out_types, way.forward(_grouped(flat, count, comm))
        outs, rest = values[: len(types)], values[len(types) :]
        if watching():
            for value, type in zip(rest, way.adjoint.forward.out_types[len(outs) :], strict=True):
                mark(comm.leaves(value), type)
        ctx.ways, ctx.way, ctx.comm, ctx.count, ctx.width = ways, way, comm, count, len(flat)
        ctx.functions = (way.adjoint.function(), *_wanted_again)
        ctx.rest, ctx.left = len(rest), _collectors(way.adjoint, flat, count)
        ctx.versions = _versions(way.adjoint)
        ctx.save_for_backward(*flat, *_flat(rest, comm))
        ctx.set_materialize_grads(False)
        leaves, read = tuple(_flat(outs, comm)), ways.whole.ends.union(ways.whole.refused)
        if len(read) < len(outs):
            width = len(leaves) // len(outs)
            quiet = [leaf for i, leaf in enumerate(leaves) if i // width not in read]
            ctx.mark_non_differentiable(*quiet)
        return leaves

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:  # type: ignore[override]
        comm, saved, way = ctx.comm, ctx.saved_tensors, _way_back(ctx, cotangents)
        if way is None:
            return (None,) * (4 + ctx.width)
        adjoint, flat = way.adjoint, saved[: ctx.width]
        values = _grouped(flat, ctx.count, comm)
        cts = _cotangents(adjoint, cotangents, comm, flat[0].device)
        if torch.is_grad_enabled() or way is not ctx.way:
            _refuse_changed(ctx.versions, adjoint)
        if torch.is_grad_enabled():
            before = len(_wanted_again)
            _wanted_again.extend(ctx.functions)
            try:
                grads = adjoint.again(values, cts, comm)
            finally:
                del _wanted_again[before:]
        else:
            if way is ctx.way:
                rest, left = _grouped(saved[ctx.width :], ctx.rest, comm), ctx.left
            else:
                rest = way.forward(values)[len(adjoint.out_types) :]
                left = _collectors(adjoint, flat, ctx.count)
            grads = way.backward([*(values[i] for i in adjoint.kept), *rest, *cts])
            if adjoint.others:
                grads = _left(ctx, adjoint, left, grads)
        by_input = dict(zip(adjoint.wanted, grads, strict=True))
        given: list[Any] = [None, None, None, None]
        for i, value in enumerate(values):
            leaves = comm.leaves(value)
            grad = None if i in adjoint.apart else by_input.get(i)
            given += [None] * len(leaves) if grad is None else comm.leaves(grad)
        return tuple(given)


def _versions(adjoint: Adjoint) -> dict[int, int]:
    """How often each tensor that a function has closed over has been written to."""
    return {id(t): version_of(t) for _, t in adjoint.forward.constants}


def _refuse_changed(versions: Mapping[int, int], adjoint: Adjoint) -> None:
    """Raises `TraceError` where a backward would read another tensor than its call has."""
    now, known = _versions(adjoint), [t for _, t in adjoint.forward.constants if id(t) in versions]
    changed = [t for t in known if versions[id(t)] != now[id(t)]]
    if changed:
        name = adjoint.forward.name.removesuffix(".forward")
        raise TraceError(
            f"a tensor of shape {tuple(changed[0].shape)} that {name} closes over was written to "
            "after the call, and this derivative reads it again.",
            hint="Take the derivative before, or pass the tensor as an argument.",
        )


def _way_back(ctx: Any, cotangents: Sequence[Any]) -> _Way | None:
    """The way for the outputs that have a cotangent: mostly the one of the forward."""
    way = ctx.way  # ranks that hold nothing go the same one
    width = len(cotangents) // len(way.adjoint.out_types)
    come = {i // width for i, leaf in enumerate(cotangents) if leaf is not None}
    refused = ctx.ways.whole.refused
    if not come.isdisjoint(refused):  # a copy: an error keeps the frames it was raised in
        raise copy(refused[min(come.intersection(refused))])
    ends = ctx.ways.whole.ends & come
    return way if ends == way.adjoint.ends else ctx.ways.of(ends)


def _cotangents(
    adjoint: Adjoint, leaves: Sequence[Any], comm: Any, device: torch.device
) -> Sequence[Any]:
    """The cotangents that a backward takes; of a replica without one, zeros."""
    width, given = len(leaves) // len(adjoint.out_types), list[Any]()
    for i in adjoint.through:
        own = leaves[i * width : (i + 1) * width]
        if any(leaf is None for leaf in own):
            own = _filled(own, adjoint.out_types[i], comm, device)
        given += own
    return _grouped(given, len(adjoint.through), comm)


def _filled(
    leaves: Sequence[Any], type: TensorType, comm: Any, device: torch.device
) -> list[torch.Tensor]:
    """The leaves of a value, with zeros for None."""
    ranks = type.mesh.order if comm.rank is None else (comm.rank,)
    return [
        empty(type, rank, device).zero_() if leaf is None else leaf
        for leaf, rank in zip(leaves, ranks, strict=True)
    ]


def _collectors(adjoint: Adjoint, flat: Sequence[Any], count: int) -> list[Any]:
    """What collects the cotangents that are left in another type, where something does."""
    width = len(flat) // max(1, count)
    return [cotangents_of(flat[adjoint.wanted[k] * width]) for k, _ in adjoint.others]


def _left(ctx: Any, adjoint: Adjoint, left: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """The cotangents, but for those that were left to what collects them."""
    comm, given = ctx.comm, [*grads]
    for (k, own), cotangents in zip(adjoint.others, left, strict=True):
        type = adjoint.backward.out_types[k]
        if cotangents is None or cotangents.is_closed:
            given[k] = run(plan(type, own, cost=comm.cost), grads[k], comm)
            continue
        leaves, first = comm.leaves(grads[k]), 4 + adjoint.wanted[k] * comm.width(type)
        if any(ctx.needs_input_grad[first : first + len(leaves)]):
            cotangents.add(type, leaves)
        given[k] = None
    return given
