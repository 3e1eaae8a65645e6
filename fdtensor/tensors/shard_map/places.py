"""`Place`: where a function in `shard_map` runs, and how ranks meet there and move tensors.

Ranks meet before they send: each says what it calls, and all see what the others call. On a real
mesh they do so where a function runs for the first time; later runs trust what was said then.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import torch

from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.errors import CommError
from fdtensor.layouts.mesh import Mesh
from fdtensor.tensors.shard_map.moves import LocalCollective

__all__ = ["Call", "OneRank", "Place", "Table", "at", "compared", "current", "says"]


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

    def index(self, axes: Sequence[str]) -> Any:
        """The index of this rank along axes, of which the last one counts fastest."""
        ...

    def shifted(self) -> Place:
        """The place for tensors with a further first dim, over which a `vmap` around goes."""
        ...

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, as one that each rank has for itself."""
        ...

    def meet(self, call: Call) -> Table:
        """The announcements of all ranks, which must be the same call with the same dtypes."""
        ...

    def carry(self, move: LocalCollective, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of this rank after a move, in memory of its own."""
        ...


class OneRank:
    """The base of a place of one rank, where tensors have values and an index is a number."""

    __slots__ = ()

    if TYPE_CHECKING:
        mesh: Mesh
        rank: int

    def index(self, axes: Sequence[str]) -> int:
        coord = self.mesh.coord(self.rank) or ()
        return self.mesh.coset(tuple(axes), coord).index(self.rank)

    def shifted(self) -> Any:
        return self

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


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


def compared(mesh: Mesh, table: Table) -> Table:
    """The table, if all ranks say the same thing of the same dtypes; else an error."""
    first = table[0]
    for rank, call in zip(mesh.order, table, strict=True):
        if (call.what, call.dtypes) != (first.what, first.dtypes):
            raise CommError(
                f"rank {mesh.order[0]} {says(first)}, but rank {rank} {says(call)}.",
                mesh=mesh,
                hint="Let every rank of the mesh call the same collectives, in the same order; "
                "choose by axis_index only what a rank computes.",
            )
    return table


def says(call: Call) -> str:
    plain = call.what.startswith(("returns", "needs", "failed"))
    return str(call) if plain else f"calls {call}"
