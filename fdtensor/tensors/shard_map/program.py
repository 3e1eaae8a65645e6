"""`Program`: a function of one rank's tensors that all simulated ranks run in turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.autograd import forward_ad

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.torch_private import forward_level, nested_jvp
from fdtensor.runtime.comm import Comm
from fdtensor.runtime.copies import refuse_different
from fdtensor.tensors.shard_map.places import Place
from fdtensor.tensors.shard_map.simulated import SimulatedPlace, simulate

__all__ = ["Kind", "Program", "Tensors", "grouped"]

Tensors = tuple[torch.Tensor, ...]


@attrs.frozen
class Kind:
    """How the tensors of all ranks are one value, to derivatives."""

    copies: tuple[str, ...]
    """The axes whose ranks have replicas of it."""
    terms: tuple[str, ...] = ()
    """The axes whose ranks have terms of it, which all have its cotangent."""

    def cotangent(self) -> Kind:
        """The kind of its cotangents."""
        return Kind(self.copies + self.terms)


Body = Callable[[Place, Sequence[torch.Tensor]], Tensors]


@attrs.define(eq=False)
class Program:
    """A function that every rank of a mesh runs, and the kinds of what it takes and gives."""

    mesh: Mesh
    comm: Comm[Any]
    body: Body
    ins: Sequence[Kind]
    outs: Sequence[Kind]
    """Known when the program has run."""
    check: bool = False
    """Whether to compare results that are said to be replicated."""
    flags: Sequence[bool] | None = None
    """Which inputs are leaves of graphs to keep; None where no graphs are kept."""
    grad: bool = attrs.field(factory=torch.is_grad_enabled)
    kept: Sequence[tuple[Tensors, Tensors]] = ()
    """For each rank the leaves and the results of its graph."""

    def run(self, leaves: Sequence[torch.Tensor]) -> Tensors:
        """The results of all ranks, from the tensors of all ranks: one after the other."""
        own_leaves = dict(
            zip(self.mesh.order, zip(*grouped(leaves, self.mesh.size), strict=True), strict=True)
        )
        flags = self.flags

        def body(rank: int) -> tuple[Tensors, Tensors]:
            own: Tensors = own_leaves[rank]
            if flags is not None:
                pairs = zip(own, flags, strict=True)
                own = tuple([t.detach().requires_grad_() if flag else t for t, flag in pairs])
            with torch.set_grad_enabled(self.grad):
                return own, self.body(SimulatedPlace(self.mesh, rank), own)

        with _level():
            graphs = simulate(self.mesh, self.comm, body)
        results = list(zip(*(outs for _, outs in graphs), strict=True))
        if self.check:
            for i, result in enumerate(results):
                name = f"result {i}" if len(results) > 1 else "the result"
                refuse_different(result, self.mesh, self.outs[i].copies, name)
        if flags is not None:
            self.kept = graphs
        given_ids = set(map(id, leaves))
        flat = [t for result in results for t in result]
        if flags is not None:
            return tuple([t.detach() for t in flat])
        return tuple([t.view_as(t) if id(t) in given_ids else t for t in flat])

    def pulled(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The cotangents of the inputs, from the graphs of all ranks."""
        cotangents_of = zip(*grouped(grads, self.mesh.size), strict=True)
        todo = dict(zip(self.mesh.order, zip(self.kept, cotangents_of, strict=True), strict=True))

        def body(rank: int) -> list[torch.Tensor | None]:
            (own, outs), own_cotangents = todo[rank]
            by = [t for t in own if t.requires_grad]
            pairs = [
                (out, g) for out, g in zip(outs, own_cotangents, strict=True) if out.requires_grad
            ]
            gradients: Any = iter([None] * len(by))
            if by and pairs:
                ends, cotangents = zip(*pairs, strict=True)
                gradients = iter(torch.autograd.grad(ends, by, cotangents, True, allow_unused=True))
            return [next(gradients) if t.requires_grad else None for t in own]

        gradients = simulate(self.mesh, self.comm, body)
        return [grad for grads in zip(*gradients, strict=True) for grad in grads]

    def transposed(self, by: Sequence[int], ends: Sequence[int]) -> Program:
        """The program of inputs and cotangents of results `ends` to cotangents of inputs `by`."""
        count = len(self.ins)

        def body(place: Place, inputs: Sequence[torch.Tensor]) -> Tensors:
            primal = self._partly(place, inputs[:count], by, ends)
            pull = torch.func.vjp(primal, *[inputs[i] for i in by])[1]
            return pull(tuple(inputs[count:]))

        ins = [*self.ins, *(self.outs[i].cotangent() for i in ends)]
        outs = [self.ins[i].cotangent() for i in by]
        return Program(self.mesh, self.comm, body, ins, outs, grad=True)

    def _partly(
        self, place: Place, inputs: Sequence[torch.Tensor], by: Sequence[int], ends: Sequence[int]
    ) -> Callable[..., Tensors]:
        """The function of inputs `by` alone that gives results `ends`."""

        def primal(*varied: torch.Tensor) -> Tensors:
            own = list(inputs)
            for i, tensor in zip(by, varied, strict=True):
                own[i] = tensor
            outs = self.body(place, own)
            return tuple([outs[i] for i in ends])

        return primal

    def pushed(self, by: Sequence[int], ends: Sequence[int]) -> Program:
        """The program of inputs and tangents of inputs `by` to tangents of results `ends`."""
        count = len(self.ins)

        def body(place: Place, inputs: Sequence[torch.Tensor]) -> Tensors:
            primal = self._partly(place, inputs[:count], by, ends)
            points = tuple([inputs[i] for i in by])
            return torch.func.jvp(primal, points, tuple(inputs[count:]))[1]

        ins = [*self.ins, *(self.ins[i] for i in by)]
        return Program(self.mesh, self.comm, body, ins, [self.outs[i] for i in ends], grad=True)

    def mapped(self, dims: Sequence[int | None], randomness: str) -> Program:
        """The program of tensors stacked along `dims`."""

        def body(place: Place, inputs: Sequence[torch.Tensor]) -> Tensors:
            one = torch.func.vmap(
                lambda *own: self.body(place, own),  # type: ignore[arg-type]
                tuple(dims),
                randomness=randomness,
            )
            return one(*inputs)

        return attrs.evolve(self, body=body, flags=None, kept=())


def grouped(leaves: Sequence[Any], size: int) -> list[tuple[Any, ...]]:
    """The leaves of each value."""
    return [tuple(leaves[i : i + size]) for i in range(0, len(leaves), size)]


@contextlib.contextmanager
def _level() -> Iterator[None]:
    """Holds a level of forward AD, which all threads have in common, while ranks run in turns.

    Else the first rank to begin a `torch.func.jvp` would end the level of all.
    """
    level = contextlib.nullcontext() if forward_level() >= 0 else forward_ad.dual_level()
    with level, nested_jvp():
        yield
