"""`fitted`: a program that holds at most so many bytes, because it makes values again.

A value that waits at a line where too much is held is freed after its last use before that line and
made again for its first use after it: computed anew, gathered again, or kept as a shard on each
rank and gathered back. Those that cost the least seconds for their bytes go first, and what is made
again is one of the values that may wait, so that whole layers are recomputed where that must be.
The greedy order is that of rematerialization in XLA; the recipes follow "Checkmate" (Jain et al.,
2020) in that any values may be kept, but need no integer program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np

from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Var
from fdtensor.plans.collectives import Step, is_local
from fdtensor.plans.cost import CostModel
from fdtensor.plans.planner import plan
from fdtensor.programs.eqn import Eqn, Together
from fdtensor.programs.memory import Lines, Usage, usage_of
from fdtensor.programs.remake import Drop, parts_of, remade
from fdtensor.programs.seconds import line_seconds

__all__ = ["fitted"]

LONGEST = 64
"""The most lines that are run again for one value."""

DEARER = 4
"""How many times the price of the first the last may have of those that are freed in a round."""

PATIENCE = 24
"""How many rounds may go without holding less before it ends."""


Seconds = dict[tuple[Eqn, tuple[Var, ...]], float]
"""Of lines with those of their results that are wanted, as far as they are known."""


def fitted(lines: Lines, budgets: Sequence[int], cost: CostModel) -> list[tuple[Lines, int]]:
    """For each budget, the lines that hold no more, or the least that is known; and their peak.

    The seconds that are added are few, not always the fewest.
    """
    paths: dict[int, Iterator[tuple[Lines, int]]] = {}

    def shrinking(target: int) -> Iterator[tuple[Lines, int]]:
        path = paths.get(target) or _shrinking(lines, target, cost)
        paths[target], path = itertools.tee(path)  # walked once, as far as any budget needs it
        return path

    # a low peak may be easier to reach than a budget
    return [_first_within(itertools.chain(shrinking(b), shrinking(0)), b) for b in budgets]


def _first_within(some: Iterable[tuple[Lines, int]], budget: int) -> tuple[Lines, int]:
    """The first lines with a peak within a budget, else those with the least."""
    least: tuple[Lines, int] | None = None
    for lines, peak in some:
        if peak <= budget:
            return lines, peak
        if least is None or peak < least[1]:
            least = lines, peak
    assert least is not None
    return least


def _shrinking(lines: Lines, max_bytes: int, cost: CostModel) -> Iterator[tuple[Lines, int]]:
    """The lines with more and more values that are made again, and how much they hold."""
    least, tries = math.inf, 0
    seconds: Seconds = {}
    while tries < PATIENCE:
        usage = usage_of(lines)
        held = usage.held.max(1)
        yield lines, int(held.max())
        excess = float(np.maximum(held - max_bytes, 0).sum())
        tries = 0 if excess < least else tries + 1
        least = min(least, excess)
        drops = _Moment(lines, usage, max_bytes, cost, seconds).drops()
        if not drops:
            return
        lines = remade(lines, drops, cost)


class _Moment:
    """The line at which most is held, and what might be freed while it runs."""

    def __init__(
        self, lines: Lines, usage: Usage, max_bytes: int, cost: CostModel, seconds: Seconds
    ) -> None:
        self.lines, self.cost, self.seconds = lines, cost, seconds
        self.owner, self.lives, self.sizes = usage.owner, usage.lives, usage.sizes
        held = usage.held.max(1)
        self.line = int(held.argmax())
        self.place = int(usage.held[self.line].argmax())
        self.rank = lines.ranks[self.place]
        self.too_much = int(held[self.line]) - max_bytes
        self.full = [0, *accumulate(int(h > max_bytes) for h in held)]
        self.maker = {v: i for i, eqn in enumerate(lines.eqns) for v in eqn.outs if v is not None}
        self.wanted: dict[int, list[Var]] = {}
        """For each memory its values that later lines read."""
        later = [*lines.outs, *(v for eqn in lines.eqns[self.line :] for v in eqn.ins)]
        for v in dict.fromkeys(later):
            self.wanted.setdefault(self.owner[v.index], []).append(v)

    def drops(self) -> list[Drop]:
        """The cheapest that free enough and do not need one another; all where none do."""
        drops = sorted(self._possible(), key=self._price)
        taken: list[Drop] = []
        gone: set[int] = set()
        read: set[int] = set()
        freed, dearest = 0, 0.0
        for drop in drops:
            if freed >= self.too_much or (taken and self._price(drop)[0] > DEARER * dearest):
                break
            if drop.owner not in read and drop.owner not in gone and not drop.sources & gone:
                taken.append(drop)
                dearest = self._price(taken[0])[0]
                gone.add(drop.owner)
                read |= drop.sources
                freed += drop.freed
        return taken

    def _price(self, drop: Drop) -> tuple[float, int]:
        """The seconds for the bytes that are freed on lines where too much is held."""
        lines = self.full[drop.at] - self.full[drop.after + 1]
        return drop.seconds / (drop.freed * max(lines, 1)), -drop.freed

    def _possible(self) -> Iterator[Drop]:
        for owner, times in self.lives.items():
            if owner in self.lines.inputs or not times[0] < self.line < times[-1]:
                continue
            if self.line in times:
                continue
            size = int(self.sizes[owner][self.place])
            if not size:
                continue
            before = max(i for i in times if i < self.line)
            at = min(i for i in times if i > self.line)
            again = self._again(owner, before, at, size)
            if again is not None:
                yield again
            yield from self._shards(owner, before, at, size)

    def _again(self, owner: int, before: int, at: int, size: int) -> Drop | None:
        """The lines that make the values of a memory from what is held at a later line."""
        wanted: dict[int, set[Var]] = {}
        sources: set[int] = set()
        stack = list(self.wanted[owner])
        while stack:
            v = stack.pop()
            line = self.maker[v]
            if v in wanted.get(line, ()):
                continue
            wanted.setdefault(line, set()).add(v)
            if len(wanted) > LONGEST:
                return None
            for u in self._operands(line, v):
                other = self.owner[u.index]
                if other != owner and self._is_held(other, at):
                    sources.add(other)
                else:
                    stack.append(u)
        again = tuple([(i, tuple(wanted[i])) for i in sorted(wanted)])
        seconds = sum([self._seconds(i, outs) for i, outs in again])
        return Drop(owner, before, at, again, frozenset(sources), seconds, size)

    def _operands(self, line: int, v: Var) -> Sequence[Var]:
        eqn = self.lines.eqns[line]
        return (eqn.ins[eqn.outs.index(v)],) if isinstance(eqn.op, Together) else eqn.ins

    def _is_held(self, owner: int, at: int) -> bool:
        times = self.lives[owner]
        return owner in self.lines.inputs or times[0] < at <= times[-1]

    def _seconds(self, line: int, outs: tuple[Var, ...]) -> float:
        key = self.lines.eqns[line], outs
        known = self.seconds.get(key)
        if known is None:
            types, parts = self.lines.types, parts_of(*key)
            known = self.seconds[key] = sum([line_seconds(types, p, self.cost) for p in parts])
        return known

    def _shards(self, owner: int, before: int, at: int, size: int) -> Iterator[Drop]:
        """A replicated value, kept in blocks along one axis and gathered again."""
        type = self.lines.types[owner]
        if self.lines.eqns[self.maker[Var(owner)]].steps or type.layout.partial:
            return  # what was gathered is gathered again from where it came
        for axis in type.mesh.axes:
            count = type.mesh.axis_size(axis)
            if count == 1 or not isinstance(type.layout[axis], Replicate):
                continue
            for dim, n in enumerate(type.shape):
                if n % (count * _blocks(type, dim)):
                    continue
                shard = type.with_layout(type.layout.split(axis, dim))
                steps = plan(shard, type, cost=self.cost).steps
                if not all(map(is_local, plan(type, shard, cost=self.cost).steps)):
                    continue
                seconds = sum(self._step_seconds(step) for step in steps)
                views = self._views(owner)
                yield Drop(
                    *(owner, before, at, views, frozenset[int](), seconds),
                    freed=size - shard.local_nbytes(self.rank),
                    shard=shard,
                )
                break

    def _views(self, owner: int) -> tuple[tuple[int, tuple[Var, ...]], ...]:
        """The lines that make the views of a memory that later lines read."""
        wanted: dict[int, set[Var]] = {}
        stack = [v for v in self.wanted[owner] if v.index != owner]
        while stack:
            v = stack.pop()
            line = self.maker[v]
            wanted.setdefault(line, set()).add(v)
            stack += [u for u in self.lines.eqns[line].ins if u.index != owner]
        return tuple((i, tuple(wanted[i])) for i in sorted(wanted))

    def _step_seconds(self, step: Step) -> float:
        return line_seconds(self.lines.types, Eqn(step, (), (), ()), self.cost)


def _blocks(type: TensorType, dim: int) -> int:
    """Into how many blocks a dim is cut."""
    count = 1
    for axis in type.layout.cuts(dim):
        count *= type.mesh.axis_size(axis)
    return count
