"""`Place`: where a function in `shard_map` runs, and how ranks meet there and move tensors.

Ranks meet before they send: each says what it calls, and all see what the others call. On a real
mesh they do so where a function runs for the first time; later runs trust what was said then.
"""

from __future__ import annotations

import contextvars
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import attrs
import torch

from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.errors import CommError, FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.planner import plan
from fdtensor.runtime.comm import Comm
from fdtensor.runtime.interpreter import execute
from fdtensor.tensors.shard_map.fibers import Done, ask, inside, run_lockstep
from fdtensor.tensors.shard_map.moves import LocalCollective, Move, Permute, plan_of, quoted

__all__ = ["Call", "Place", "RealPlace", "SimulatedPlace", "at", "current", "simulate"]


@attrs.frozen
class Call:
    """The announcement of a rank before tensors move: its call, and the shapes of its tensors."""

    what: str
    """Such as `psum over 'tp'`; ranks that say different things fail together."""
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    tracked: tuple[bool, ...] = ()
    """Whether a derivative by each tensor may be asked for."""

    @classmethod
    def of(cls, what: str, tensors: Sequence[torch.Tensor], tracked: Sequence[bool]) -> Call:
        """The call with these tensors."""
        shapes = tuple([tuple(t.shape) for t in tensors])
        return cls(what, shapes, tuple([dtype_name(t.dtype) for t in tensors]), tuple(tracked))

    def __str__(self) -> str:
        types = [
            f"{t}[{','.join(map(str, s))}]" for t, s in zip(self.dtypes, self.shapes, strict=True)
        ]
        of = " " if self.what == "returns" else " of "
        return self.what + (of + ", ".join(types) if types else "")


Table = Sequence[Call]
"""The announcements of the ranks of a mesh, in its order."""


class Place(Protocol):
    """This rank's place in a mesh while its function runs, and after that for derivatives."""

    mesh: Mesh
    rank: int
    token: torch.Tensor | None
    """A tensor that depends on all collectives so far: backward passes run them all, in order."""

    def meet(self, call: Call) -> Table:
        """The announcements of all ranks, which must be the same call with the same dtypes."""
        ...

    def carry(self, move: LocalCollective, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of this rank after a move, in memory of its own."""
        ...


_current: contextvars.ContextVar[Place | None] = contextvars.ContextVar("place", default=None)


def current() -> Place | None:
    """Where this code runs, if it runs in `shard_map`."""
    return _current.get()


@contextmanager
def at(place: Place) -> Iterator[None]:
    """Lets code run at a place."""
    mark = _current.set(place)
    try:
        yield
    finally:
        _current.reset(mark)


def _compared(mesh: Mesh, table: Table) -> Table:
    """The table, if all ranks say the same thing of the same dtypes; else an error."""
    first = table[0]
    for rank, call in zip(mesh.order, table, strict=True):
        if (call.what, call.dtypes) != (first.what, first.dtypes):
            raise CommError(
                f"rank {mesh.order[0]} {_says(first)}, but rank {rank} {_says(call)}.",
                mesh=mesh,
                hint="Let every rank of the mesh call the same collectives, in the same order; "
                "choose by axis_index only what a rank computes.",
            )
    return table


def _says(call: Call) -> str:
    plain = call.what.startswith(("returns", "needs", "failed"))
    return str(call) if plain else f"calls {call}"


# --- simulated ranks -------------------------------------------------------------------------


@attrs.frozen(eq=False)
class _Carry:
    """The request of a fiber: a move of its tensor."""

    move: LocalCollective
    tensor: torch.Tensor


@attrs.define(eq=False)
class SimulatedPlace:
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
        return [_compared(mesh, [_said(request) for request in requests])] * mesh.size
    if len({(type(request.move), request.move.axes) for request in requests}) > 1:
        _compared(mesh, [_said(request) for request in requests])
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


# --- real ranks ------------------------------------------------------------------------------


@attrs.define(eq=False)
class RealPlace:
    """The place of this process. It hears what all ranks say, or trusts what `known` tells."""

    mesh: Mesh
    rank: int
    comm: Comm[Any]
    known: Sequence[Table] | None
    token: torch.Tensor | None = None
    heard: list[Table] = attrs.field(factory=list)
    over: bool = False
    """Whether all ranks have failed together."""

    def meet(self, call: Call) -> Table:
        if self.known is not None:
            table = self.known[len(self.heard)] if len(self.heard) < len(self.known) else ()
            self.heard.append(table)
            first = table[self.mesh.position(self.rank) or 0] if table else "nothing"
            if first != call:
                raise CommError(
                    f"rank {self.rank} {_says(call)}, which it did not at the first call.",
                    first=first,
                    hint="Let shapes and collectives follow from the types of the arguments, or "
                    "make the Comm with check='always'.",
                )
            return table
        table = self._told(call)
        try:
            for rank, call_of_rank in zip(self.mesh.order, table, strict=True):
                if call_of_rank.what.startswith("failed"):
                    raise CommError(
                        f"rank {rank} {call_of_rank.what}",
                        hint="Look at what that rank raises; the others stop with it.",
                    )
            self.heard.append(_compared(self.mesh, table))
        except CommError:
            self.over = True
            raise
        return table

    def fail(self, error: BaseException) -> None:
        """Tells ranks that wait for this one that it has failed, where they would hear it."""
        if self.known is None and not self.over:
            text = error.sentence if isinstance(error, FdtensorError) else str(error)
            self.over = True
            self._told(Call(f"failed in shard_map with {type(error).__name__}: {text[:500]}"))

    def carry(self, move: LocalCollective, tensor: torch.Tensor) -> torch.Tensor:
        way = plan_of(move, self.mesh, self.mesh.coord(self.rank) or (), tensor, self.comm.cost)
        if isinstance(move, Move):
            assert way is not None
            return execute(way, tensor, self.comm)
        if way is not None:
            gives = way.src.mesh.position(self.rank) is not None
            row = tensor[None] if gives else tensor.new_empty((0,) * (tensor.dim() + 1))
            out = execute(way, row, self.comm)
            if way.dst.mesh.position(self.rank) is not None:
                return out[0]
        return torch.zeros_like(tensor)

    def _told(self, call: Call) -> Table:
        text = json.dumps([call.what, call.shapes, call.dtypes, call.tracked]).encode()
        lengths = self._gathered(torch.tensor([len(text)]))
        size = int(lengths.max())
        padded = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)
        rows = self._gathered(padded).cpu().view(self.mesh.size, size)
        return [_read(bytes(row.tolist())) for row in rows]

    def _gathered(self, block: torch.Tensor) -> torch.Tensor:
        line = Mesh.from_ranks(self.mesh.ranks, "rank")
        whole = TensorType((block.numel() * line.size,), block.dtype, Layout(line, [Shard(0)]))
        way = plan(whole, Layout(line, [Replicate()]), cost=self.comm.cost)
        return execute(way, block.to(self.comm.device), self.comm)  # type: ignore[attr-defined]


def _read(text: bytes) -> Call:
    what, shapes, dtypes, tracked = json.loads(text)
    return Call(what, tuple(map(tuple, shapes)), tuple(dtypes), tuple(tracked))
