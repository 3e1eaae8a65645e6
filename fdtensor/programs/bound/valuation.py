"""`Valuation`: what each site of each value is worth, so that no choice costs less than all nodes.

A node costs its seconds and what the sites of its operands and results cost; all nodes together are
a bound. A sweep hands what a site costs beyond the least on to the other end of its value, which
only raises the bound (Kolmogorov, 2006, Convergent Tree-Reweighted Message Passing for Energy
Minimization).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fdtensor.programs.bound.relaxation import Relaxation
from fdtensor.programs.bound.space import Floats, Space
from fdtensor.programs.bound.wires import Edge, Moves, Wire
from fdtensor.programs.flows import Values
from fdtensor.programs.nodes import Node

__all__ = ["Valuation"]


class Valuation:
    """The worth of all sites of the values between nodes.

    `class_of` has the class of each node, `spaces` the combinations of each class. `moves` and
    `shared`, whether a move is paid once for all takers, are those of each of `values`.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        class_of: Sequence[int],
        spaces: Mapping[int, Space],
        values: Sequence[Values],
        moves: Sequence[Moves],
        shared: Sequence[bool],
    ) -> None:
        self.spaces = [spaces[c] for c in class_of]
        """The combinations of each node."""
        self.gets: list[dict[int, Edge]] = [{} for _ in nodes]
        """The edge of each operand of each node."""
        self.gives: list[dict[int, Sequence[Edge]]] = [{} for _ in nodes]
        """The edges of each result that is read."""
        self.wires: list[tuple[int, Wire, list[tuple[int, int]]]] = []
        """Which of `values` a wire is one of, the wire, and the classes that take it."""
        readers: dict[int, list[tuple[int, int]]] = {}
        for n, node in enumerate(nodes):
            for i, v in enumerate(node.ins):
                readers.setdefault(v, []).append((n, i))
        group = {(x.maker, frozenset(x.takers.items())): g for g, x in enumerate(values)}
        for n, node in enumerate(nodes):
            for k, v in enumerate(node.outs):
                if v is not None and v in readers:
                    takers = [(class_of[m], i) for m, i in readers[v]]
                    g = group[(class_of[n], k), frozenset(Counter(takers).items())]
                    within = [spaces[c].ins[i].numbers_in(moves[g].taken) for c, i in takers]
                    wire = Wire(moves[g], shared[g], within)
                    self.wires.append((g, wire, takers))
                    self.gives[n][k] = wire.edges
                    for (m, i), edge in zip(readers[v], wire.edges, strict=True):
                        self.gets[m][i] = edge

    def learn(self, program: Relaxation) -> None:
        """Takes the worth of sites from a solution of the relaxation."""
        for g, wire, takers in self.wires:
            each = {taker: program.known(g, taker) for taker in set(takers)}
            wire.value([each[taker] for taker in takers])

    def sweep(self) -> None:
        """Values all sites anew, forward and backward, and divides what moves cost."""
        for n in range(len(self.spaces)):
            seconds, share = self._met(n)
            for k, edges in self.gives[n].items():
                extra = _least_at(seconds, self.spaces[n].out_site(k), len(edges[0].made))
                for edge in edges:
                    edge.made = edge.made - extra * share
        for n in reversed(range(len(self.spaces))):
            seconds, share = self._met(n)
            for i, edge in self.gets[n].items():
                extra = _least_at(seconds, self.spaces[n].in_site(i), len(edge.taken))
                edge.taken = edge.taken - extra * share
        for _, wire, _ in self.wires:
            wire.divide()

    def _met(self, n: int) -> tuple[Floats, float]:
        """What combinations of a node cost beyond the least, where all sites cost what is left for
        it, and the share of that which an edge may hand on."""
        for edge in self.gets[n].values():
            edge.take()
        for edges in self.gives[n].values():
            for edge in edges:
                edge.make()
        seconds = self.seconds(n)
        count = max(1, len(self.gets[n]), sum(map(len, self.gives[n].values())))
        return seconds - seconds.min(), 1 / count

    def take(self) -> None:
        """Asks of all takers what makers leave: from then on all nodes together are a bound."""
        for _, wire, _ in self.wires:
            for edge in wire.edges:
                edge.take()

    def seconds(self, n: int) -> Floats:
        """The seconds of each combination of a node, with what its sites cost."""
        space = self.spaces[n]
        seconds: Floats = np.array(space.seconds)
        for i, edge in self.gets[n].items():
            seconds += edge.taken[space.in_site(i)]
        for k, edges in self.gives[n].items():
            made = edges[0].made if len(edges) == 1 else np.sum([e.made for e in edges], axis=0)
            seconds += made[space.out_site(k)]
        return seconds


def _least_at(seconds: Floats, sites: NDArray[np.int64], count: int) -> Floats:
    """The least seconds of the combinations at each site."""
    least = np.full(count, np.inf)
    np.minimum.at(least, sites, seconds)
    return least
