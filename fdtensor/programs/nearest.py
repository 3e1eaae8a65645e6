"""`nearest`: the option of a call at its sizes that stands for the one chosen at others.

A row that cuts a slice, a padding, several merged dims or what a halo needs says for each size how
long the blocks are: `x[1:]` of 512 rows is cut `[255,256]`, of 8 rows `[3,4]`. So a cut of a dim
stands for another cut of it, and blocks in which a value was read as it was computed are those in
which it is computed now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import attrs

from fdtensor.layouts.blocks import chunk
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut, Placement, Ragged, Shard, Spans, StridedShard
from fdtensor.ops.graph import Call, Full, Graph, Var
from fdtensor.ops.rows import CallKey
from fdtensor.programs.choices import Choice
from fdtensor.programs.decomposed import decomposed
from fdtensor.programs.nodes import Option, Place
from fdtensor.programs.sized import LISTED, fits, kind

__all__ = ["Past", "kinds"]

Domain = Mapping[Var, Collection[Placement]]
"""The placements in which each value may be computed."""


@attrs.frozen(eq=False)
class Past:
    """The choice on an axis that is repeated, and the graph at the sizes for which it is."""

    choice: Choice
    graph: Graph
    mesh: Mesh
    axis: str
    domain: Domain

    def nearest(self, options: Sequence[Option], i: int) -> Option:
        """The option of call `i` that stands for the one that was chosen.

        It is among those that cut the same dims: first one that takes operands as they come where
        these were so taken, then one of blocks of the same kind, then of the closest ends. Raises
        `TraceError` where there is none.
        """
        call, chosen = self.graph.calls[i], self.choice.calls[i].key
        alike = [option for option in options if kinds(option.key) == kinds(chosen)]
        if not alike:
            raise self._no_such_row(call, chosen)
        wanted = [self._at_hand(v, p) for v, p in zip(call.ins, chosen[0], strict=True)]
        values = (*call.ins, *call.outs)
        fulls = [None if v is None else self.graph.types[v.index] for v in values]
        ends = [self._ends(p, full) for p, full in zip(_flat(chosen), fulls, strict=True)]

        def distance(o: Option) -> tuple[float, ...]:
            own = [self._ends(p, full) for p, full in zip(_flat(o.key), fulls, strict=True)]
            return (
                _others(o.ins, wanted),
                _others(o.outs, chosen[1]),
                o.key != chosen,
                sum(map(_apart, own, ends)),
            )

        return min(alike, key=distance)

    def result(self, k: int) -> Placement:
        """The placement of output `k` that stands for the one that was chosen."""
        v, p = self.graph.outs[k], self.choice.outs[k]
        full = self.graph.types[v.index]
        if fits(p, full):
            return p
        own = self._at_hand(v, p)
        return own if own is not p else Shard(p.dim)  # type: ignore[union-attr]

    def bodies(self, i: int) -> list[Option]:
        """The decomposition of call `i` that was chosen, if there is one at these sizes.

        Its ends are cut evenly where blocks were listed.
        """
        call, past = self.graph.calls[i], self.choice.calls[i]
        fulls = tuple(self.graph.types[v.index] for v in call.ins)
        read = tuple(v is not None for v in call.outs)
        graph = decomposed(CallKey.of(call), fulls, read, past.note.blocks)
        if graph is None:
            return []
        ins = tuple([self._even(v, p) for v, p in zip(call.ins, past.ins, strict=True)])
        outs = tuple([self._even(v, p) for v, p in zip(call.outs, past.outs, strict=True)])
        return [Option(ins, outs, past.seconds, attrs.evolve(past.note, graph=graph))]

    def looks(self, i: int) -> tuple[Any, ...]:
        """What the nearest option of call `i` depends on."""
        option = self.choice.calls[i]
        placed = [self.choice.placements.get(v) for v in self.graph.calls[i].ins]
        return option.key, getattr(option.note, "blocks", None), tuple(placed)

    def _at_hand(self, v: Var, p: Place) -> Any:
        """How a value is computed at these sizes that was computed as `p`; else `p` itself."""
        if self.choice.placements.get(v) != p or not isinstance(p, Cut):
            return p
        return next((q for q in self.domain[v] if kind(q) == kind(p)), p)

    def _even(self, v: Var | None, p: Place) -> Place:
        whole = v is None or not isinstance(p, LISTED)
        return p if whole or fits(p, self.graph.types[v.index]) else Shard(p.dim)  # type: ignore

    def _ends(self, p: Place, full: Full | None) -> list[float]:
        """Where blocks end, as parts of the dim."""
        match p:
            case Ragged(_, sizes):
                return [end / max(1, sum(sizes)) for end in accumulate(sizes)]
            case Spans(_, spans):
                size = max([end for ranges in spans for _, end in ranges], default=1)
                return [ranges[-1][1] / size if ranges else 0.0 for ranges in spans]
            case StridedShard(_, blocks):
                return [1 / blocks]
            case Shard(dim) if full is not None:
                size = full.shape[dim]
                count = self.mesh.axis_size(self.axis)
                stops = [chunk(size, count, i)[1] for i in range(count)]
                return [stop / max(1, size) for stop in stops]
            case _:
                return []

    def _no_such_row(self, call: Call, chosen: tuple[Any, ...]) -> TraceError:
        """The error for a call that cannot do at these sizes what was chosen at others."""
        shapes = [self.graph.types[v.index].shape for v in call.ins]
        return TraceError(
            f"as_if= (or like=) repeats what was chosen at other sizes, and {call.op} of "
            f"{', '.join(map(str, shapes))} cannot do it.",
            line=call.mark,
            axis=self.axis,
            chosen=f"{' '.join(map(str, chosen[0]))} -> {' '.join(map(str, chosen[1]))}",
            hint=f"Take sizes that the mesh cuts as it does the others, such as multiples of "
            f"{self.mesh.size}, or leave the option out for this function.",
        )


def kinds(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The placements of an option, without what depends on sizes."""
    return tuple([tuple(map(kind, side)) for side in key])


def _flat(key: tuple[Any, ...]) -> list[Any]:
    return [*key[0], *key[1]]


def _others(own: Iterable[Place], wanted: Iterable[Place]) -> int:
    """How many placements are of another kind than is wanted."""
    return sum(type(p) is not type(q) for p, q in zip(own, wanted, strict=True))


def _apart(own: Sequence[float], ends: Sequence[float]) -> float:
    """How far ends of blocks are from others."""
    return sum(abs(a - b) for a, b in zip(own, ends, strict=False))
