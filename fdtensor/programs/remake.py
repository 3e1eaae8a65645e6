"""`remade`: the lines of a program with values that are freed and made again."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Var
from fdtensor.ops.saved_values import ALIAS
from fdtensor.plans.cost import CostModel
from fdtensor.plans.planner import plan
from fdtensor.programs.eqn import Eqn, Together, renamed
from fdtensor.programs.memory import Lines

__all__ = ["Drop", "parts_of", "remade"]


@attrs.frozen(eq=False)
class Drop:
    """Memory that is freed after a line, and its values that are made again before a later one."""

    owner: int
    """The number of the value whose memory it is."""
    after: int
    """The line after which it is freed."""
    at: int
    """The line before which its values are made again."""
    again: tuple[tuple[int, tuple[Var, ...]], ...]
    """The lines that are run again, with those of their results that are wanted."""
    sources: frozenset[int]
    """The memory that these lines read."""
    seconds: float
    freed: int
    shard: TensorType | None = None
    """The type in which the owner waits, where it is kept as a shard."""


def parts_of(eqn: Eqn, outs: Sequence[Var]) -> list[Eqn]:
    """A line with only these results; steps that share a line are separate lines."""
    if isinstance(eqn.op, Together):
        return [
            Eqn(step, (v,), (), (out,))
            for step, v, out in zip(eqn.op.steps, eqn.ins, eqn.outs, strict=True)
            if out in outs
        ]
    return [attrs.evolve(eqn, outs=tuple(v if v in outs else None for v in eqn.outs))]


def remade(lines: Lines, drops: Sequence[Drop], cost: CostModel) -> Lines:
    """The lines with the values of `drops` freed and made again."""
    return _Writer(lines, cost).written(drops)


def _needed(eqns: Sequence[Eqn], outs: Sequence[Var]) -> tuple[Eqn, ...]:
    """The lines that an output needs, or that may raise: what is made again, others may have read.

    One that nobody reads would hold its result until its message has come in, in the end.
    """
    needed, kept = set(outs), list[Eqn]()
    for eqn in reversed(eqns):
        if eqn.outs and needed.isdisjoint(v for v in eqn.outs if v is not None):
            continue
        kept.append(_with_alone(eqn, needed))
        needed.update(kept[-1].ins)
    return tuple(reversed(kept))


def _with_alone(eqn: Eqn, wanted: set[Var]) -> Eqn:
    """A line without results that are not wanted, and without what travels for these."""
    if wanted.issuperset(eqn.outs):
        return eqn
    if not isinstance(eqn.op, Together):
        return attrs.evolve(eqn, outs=tuple(v if v in wanted else None for v in eqn.outs))
    read = [i for i, v in enumerate(eqn.outs) if v in wanted]
    first, *others = [eqn.op.steps[i] for i in read]
    op = Together((first, *others)) if others else first
    return Eqn(op, tuple([eqn.ins[i] for i in read]), (), tuple([eqn.outs[i] for i in read]))


class _Writer:
    """The new lines as they are written."""

    def __init__(self, lines: Lines, cost: CostModel) -> None:
        self.lines, self.cost = lines, cost
        self.types = list(lines.types)
        self.eqns: list[Eqn] = []
        self.name: dict[Var, Var] = {}
        """The value that lines read from now on in place of one that was freed."""
        self.kept: dict[int, Var] = {}
        """The shards that wait, by the memory that they were cut from."""

    def written(self, drops: Sequence[Drop]) -> Lines:
        """All lines, each after the values that are made again for it."""
        early: dict[int, list[Drop]] = {}
        late: dict[int, list[Drop]] = {}
        for drop in drops:
            late.setdefault(drop.at, []).append(drop)
            early.setdefault(drop.after, []).append(drop)
        for i, eqn in enumerate(self.lines.eqns):
            for drop in late.get(i, ()):
                self.name |= self._again(drop)
            self.eqns.append(renamed(eqn, self.name))
            for drop in early.get(i, ()):
                self._cut(drop)
        for drop in late.get(len(self.lines.eqns), ()):
            self.name |= self._again(drop)
        outs = tuple(self.name.get(v, v) for v in self.lines.outs)
        eqns = _needed(self.eqns, outs)
        return attrs.evolve(self.lines, eqns=eqns, outs=outs, types=self.types)

    def _new(self, type: TensorType) -> Var:
        self.types.append(type)
        return Var(len(self.types) - 1)

    def _moved(self, v: Var, dst: TensorType) -> Var:
        for step in plan(self.types[v.index], dst, cost=self.cost).steps:
            after = self._new(step.dst)
            self.eqns.append(Eqn(step, (v,), (), (after,)))
            v = after
        return v

    def _cut(self, drop: Drop) -> None:
        """Cuts the shard in which a value waits, if any."""
        if drop.shard is not None:
            whole = self.name.get(Var(drop.owner), Var(drop.owner))
            self.kept[drop.owner] = self._moved(whole, drop.shard)

    def _again(self, drop: Drop) -> dict[Var, Var]:
        """The values that are made again, by those that they stand for."""
        made: dict[Var, Var] = {}
        if drop.shard is not None:
            block = self._new(drop.shard)
            self.eqns.append(Eqn(ALIAS, (self.kept[drop.owner],), (), (block,), "kept"))
            made[Var(drop.owner)] = self._moved(block, self.types[drop.owner])
        for i, wanted in drop.again:
            for part in parts_of(self.lines.eqns[i], wanted):
                read = {**self.name, **made}
                made |= {v: self._new(self.types[v.index]) for v in part.outs if v is not None}
                outs = tuple(None if v is None else made[v] for v in part.outs)
                self.eqns.append(attrs.evolve(renamed(part, read), outs=outs))
        return made
