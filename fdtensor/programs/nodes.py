"""`Node` and `Option`: what there is to choose from, as the solver takes it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, Protocol

import attrs

from fdtensor.layouts.placement import Placement

__all__ = ["Node", "OnAxes", "Option", "Place", "Placements", "Price"]

Place = Placement | Literal["free"]
"""A placement, or "free": an operand that no call reads, a result in any but a pending one."""

Placements = tuple[Placement, ...]
"""A placement on each axis of a mesh."""


@attrs.frozen(eq=False)
class Option:
    """One way to run a node: the placements of its operands and results, and its own seconds."""

    ins: tuple[Any, ...]
    """A `Place` for each operand, or a tuple of them, one for each axis."""
    outs: tuple[Any, ...]
    seconds: float
    note: Any = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Its placements, which no other option of its node has."""
        return self.ins, self.outs


@attrs.frozen(eq=False)
class OnAxes:
    """What an option of all axes is on each of them, and the order of the axes that cut one dim."""

    along: Mapping[str, Option]
    order: tuple[str, ...]


MANY = 6
"""From how many operands or results of a node on those that are placed alike count as one."""


@attrs.frozen(eq=False)
class Node:
    """A node: its operands and results, by the numbers of values, and its options."""

    ins: tuple[int, ...]
    outs: tuple[int | None, ...]
    options: tuple[Option, ...]
    uses: tuple[Any, ...] = ()
    """For each operand what prices its moves besides; none for nothing."""

    def use(self, i: int) -> Any:
        """What prices the moves of operand `i` besides the placements."""
        return self.uses[i] if self.uses else None

    def equals(self) -> tuple[list[int], list[int]]:
        """For each operand and each result, where they are many, the first one placed as it is.

        Nothing but its number tells one from another: a step of a loop from the next, in what
        `unbind` gives and `stack` takes.
        """
        ins, outs = list(range(len(self.ins))), list(range(len(self.outs)))
        if len(ins) >= MANY:
            along = zip(*(o.ins for o in self.options), strict=True)
            taken = [(x, self.use(i)) for i, x in enumerate(along)]
            ins = [taken.index(x) for x in taken]
        if len(outs) >= MANY:
            given = list(zip(*(o.outs for o in self.options), strict=True))
            outs = [given.index(x) for x in given]
        return ins, outs


class Price(Protocol):
    """The prices of moves."""

    def __call__(self, v: int, src: Any, dst: Any, use: Any = None, /) -> float:
        """The seconds that moving value `v` from one placement to another takes, for a use."""
        ...

    def between(
        self, v: int, srcs: Sequence[Any], dsts: Sequence[Any], use: Any = None, /
    ) -> list[float]:
        """The same of all moves from `srcs` to `dsts`, of which the latter run fastest."""
        return [self(v, src, dst, use) for src in srcs for dst in dsts]

    def kind(self, v: int) -> Hashable:
        """What the prices of a value depend on: values of one kind are priced alike."""
        ...
