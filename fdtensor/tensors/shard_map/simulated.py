"""`simulate`: the ranks of a mesh that run in this process, each in a fiber, in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.mesh import Mesh
from fdtensor.runtime.comm import Comm
from fdtensor.runtime.interpreter import execute
from fdtensor.tensors.shard_map.fibers import Done, ask, inside, run_lockstep
from fdtensor.tensors.shard_map.moves import LocalCollective, Permute, plan_of, quoted
from fdtensor.tensors.shard_map.places import Call, OneRank, Table, compared

__all__ = ["SimulatedPlace", "simulate"]


@attrs.frozen(eq=False)
class _Carry:
    """The request of a fiber: a move of its tensor."""

    move: LocalCollective
    tensor: torch.Tensor


@attrs.define(eq=False)
class SimulatedPlace(OneRank):
    """The place of one of the ranks that run in this process, each in a fiber."""

    mesh: Mesh
    rank: int
    token: torch.Tensor | None = None

    def meet(self, call: Call) -> Table:
        return ask(call)

    def carry(self, move: LocalCollective, tensor: torch.Tensor) -> torch.Tensor:
        if not inside():
            raise CommError(
                "a tensor of one simulated rank was used outside of shard_map.",
                rank=self.rank,
                hint="Return it from the function, and use what shard_map returns.",
            )
        return ask(_Carry(move, tensor))


def simulate(mesh: Mesh, comm: Comm[Any], body: Callable[[int], Any]) -> list[Any]:
    """The results of `body` on the ranks of the mesh, in its order."""
    bodies = [lambda rank=rank: body(rank) for rank in mesh.order]
    return run_lockstep(bodies, lambda requests: _serve(mesh, comm, requests))


def _serve(mesh: Mesh, comm: Comm[Any], requests: Sequence[Any]) -> Sequence[Any]:
    """The answers to what all ranks ask for: to a `Call` what all say, to a move its result."""
    if not all(isinstance(request, _Carry) for request in requests):
        return [compared(mesh, [_said(request) for request in requests])] * mesh.size
    if len({(type(request.move), request.move.axes) for request in requests}) > 1:
        compared(mesh, [_said(request) for request in requests])
    tensors = {r: request.tensor.detach() for r, request in zip(mesh.order, requests, strict=True)}
    arrived: dict[int, torch.Tensor] = {}
    calls: Counter[str] = comm.calls  # type: ignore[attr-defined]
    before, seen, most = calls.copy(), calls.copy(), Counter[str]()
    for rank, request in zip(mesh.order, requests, strict=True):
        coord = mesh.coord(rank) or ()
        if mesh.coset(request.move.axes, coord)[0] != rank:
            continue
        way = plan_of(request.move, mesh, coord, request.tensor, comm.cost)
        if way is None:
            continue
        row = isinstance(request.move, Permute)
        value = tuple([tensors[r][None] if row else tensors[r] for r in way.src.mesh.order])
        with torch.no_grad():
            results = execute(way, value, comm)
        for r, out in zip(way.dst.mesh.order, results, strict=True):
            arrived[r] = out[0] if row else out
        most |= calls - seen
        seen = calls.copy()
    calls.clear()
    calls.update(before + most)  # all cosets call at the same time
    return [arrived[r] if r in arrived else torch.zeros_like(t) for r, t in tensors.items()]


def _said(request: Any) -> Call:
    match request:
        case _Carry(move, tensor):
            return Call.of(
                f"needs a move over {quoted(move.axes)} for its derivative", [tensor], ()
            )
        case Done():
            return Call("needs nothing more")
        case _:
            return request
