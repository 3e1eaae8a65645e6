"""`Wire`: the moves of a value, and what its sites are worth to those who make and take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from fdtensor.programs.bound.space import Floats, Sites
from fdtensor.programs.prices import Prices

__all__ = ["Edge", "Known", "Moves", "Wire"]


@attrs.define(eq=False)
class Moves:
    """The moves of values that are alike, between all sites where they are made and taken."""

    v: int
    """One of the values."""
    made: Sites
    taken: Sites
    seconds: Floats
    """Of a move from each site of `made` to each of `taken`, or less."""
    exact: set[tuple[int, int]] = attrs.field(factory=lambda: set[tuple[int, int]]())
    """The moves whose seconds are known."""

    def ask(self, prices: Prices, p: int, q: int, most: float) -> bool:
        """Whether a move from site `p` to `q` takes more than was known, by its plan.

        It counts as `most` seconds where it takes more.
        """
        if (p, q) in self.exact:
            return False
        self.exact.add((p, q))
        before, places = self.seconds[p, q], (self.made.each[p], self.taken.each[q])
        self.seconds[p, q] = max(before, min(most, prices(self.v, *places)))  # type: ignore[arg-type]
        return bool(self.seconds[p, q] > before)


class Edge:
    """A value on its way to one node that takes it.

    `made` is what each site costs who makes it, `taken` what each site costs who takes it: together
    at most `borne`, the seconds of the move between them that this taker bears.
    """

    def __init__(self, wire: Wire, within: NDArray[np.int64], takers: int) -> None:
        self.wire = wire
        self.within = within
        """The sites of the taker, among those of the wire."""
        self.borne: Floats = wire.moves.seconds[:, within] / takers
        self.made: Floats = np.zeros(self.borne.shape[0])
        self.taken: Floats = np.zeros(self.borne.shape[1])

    def take(self) -> None:
        """Asks as much of the taker as the maker leaves."""
        self.taken = (self.borne - self.made[:, None]).min(axis=0)

    def make(self) -> None:
        """Asks as much of the maker as the taker leaves."""
        self.made = (self.borne - self.taken).min(axis=1)


@attrs.frozen(eq=False)
class Known:
    """What some sites cost who makes a value there, and what a taker bears of some moves."""

    sites: NDArray[np.int64]
    made: Floats
    borne: Mapping[tuple[int, int], float]


class Wire:
    """A value, the moves that there are of it, and the edges to those who take it."""

    def __init__(self, moves: Moves, shared: bool, within: Sequence[NDArray[np.int64]]) -> None:
        self.moves, self.shared = moves, shared
        self.edges = [Edge(self, w, len(within) if shared else 1) for w in within]

    def divide(self) -> None:
        """Divides the seconds of each move anew: what one taker does not need, all share.

        Where every taker pays its own move, it bears that alone.
        """
        seconds = self.moves.seconds
        if not self.shared or len(self.edges) == 1:
            for edge in self.edges:
                edge.borne = seconds[:, edge.within]
            return
        each = [np.maximum(0.0, e.made[:, None] + e.taken) for e in self.edges]
        needed = np.zeros(seconds.shape)
        for edge, own in zip(self.edges, each, strict=True):
            needed[:, edge.within] += own
        less = np.where(needed > seconds, seconds / np.maximum(needed, 1e-300), 1.0)
        rest = np.maximum(0.0, seconds - needed) / len(self.edges)
        for edge, own in zip(self.edges, each, strict=True):
            edge.borne = own * less[:, edge.within] + rest[:, edge.within]

    def value(self, known: Sequence[Known]) -> None:
        """Takes what is known for each edge; what the other sites are worth follows."""
        self._bear([of.borne for of in known])
        for edge, of in zip(self.edges, known, strict=True):
            edge.taken = (edge.borne[of.sites] - of.made[:, None]).min(axis=0)
            edge.make()
            edge.made[of.sites] = of.made

    def _bear(self, known: Sequence[Mapping[tuple[int, int], float]]) -> None:
        """Divides the seconds of moves as is known, and the rest among those of whom it is not."""
        seconds = self.moves.seconds
        if not self.shared:
            return
        each = [np.full(seconds.shape, np.nan) for _ in known]
        for part, borne in zip(each, known, strict=True):
            for pq, some in borne.items():
                part[pq] = max(0.0, some)
        total = sum(np.nan_to_num(part) for part in each)
        silent = sum(np.isnan(part) for part in each)
        less = np.where(total > seconds, seconds / np.maximum(total, 1e-300), 1.0)
        rest = np.maximum(0.0, seconds - total) / np.maximum(silent, 1)
        for edge, part in zip(self.edges, each, strict=True):
            edge.borne = np.where(np.isnan(part), rest, part * less)[:, edge.within]
