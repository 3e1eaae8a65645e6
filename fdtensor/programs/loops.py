"""`in_loops` and `loops_of`: the lines of loops side by side, and where each loop is among them.

A loop is its `LOOP_IN` lines, what its predicate needs, what its steps need besides, and its
`LOOP_NEXT` lines, in this order. What does not depend on what is carried comes before it, and so
runs once; what does, and is not needed for a step, comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import attrs

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.remembered import while_alive
from fdtensor.ops.graph import Graph, Var
from fdtensor.ops.loop_ops import (
    LOOP_IN,
    LOOP_NEXT,
    LOOP_OPS,
    LOOP_OUT,
    UNKNOWN,
    loop_number,
    loop_steps,
)
from fdtensor.programs.eqn import Eqn

if TYPE_CHECKING:
    from fdtensor.programs.program import Program

__all__ = ["Loop", "has_loops", "in_loops", "loops_among", "loops_of", "made_in_steps", "times"]


@attrs.frozen
class Loop:
    """Where the lines of a loop are, by their numbers; others may be inside of it."""

    start: int
    """Of the first line after those by which values come in: from here on lines run again."""
    asks: int
    """Of the first line after those that the predicate needs: here the loop may end."""
    rounds: int
    """Of the first of those by which values go round, its last ones."""
    stop: int
    """Of the first line after it."""
    go: Var
    """The predicate."""
    steps: int
    """How many steps there are, or `UNKNOWN`."""


def has_loops(eqns: Iterable[Eqn]) -> bool:
    """Whether there is a loop among these lines."""
    return any(eqn.op is LOOP_IN for eqn in eqns)


@while_alive(512)
def loops_of(program: Program) -> tuple[Loop, ...]:
    """The loops of a program, in the order in which they begin, outer ones first."""
    return loops_among(program.eqns)


def loops_among(eqns: Sequence[Eqn]) -> tuple[Loop, ...]:
    """The same of the lines of a program."""
    if not has_loops(eqns):
        return ()
    places: dict[object, list[int]] = {}
    for i, eqn in enumerate(eqns):
        if eqn.op in (LOOP_IN, LOOP_NEXT):
            places.setdefault(loop_number(eqn.args), []).append(i)
    loops: list[Loop] = []
    for lines in places.values():
        heads = [i for i in lines if eqns[i].op is LOOP_IN]
        start, stop = heads[-1] + 1, lines[-1] + 1
        go = eqns[lines[-1]].ins[0]
        needs = _needed(eqns[start:stop], [go], _units(eqns[start:stop]))
        asks = start + max(needs, default=-1) + 1
        steps = loop_steps(eqns[heads[0]].args)
        loops.append(Loop(start, asks, lines[len(heads)], stop, go, steps))
    return tuple(sorted(loops, key=lambda loop: (loop.start, -loop.stop)))


@while_alive(512)
def times(program: Program) -> tuple[int, ...]:
    """How often each line runs; those of a loop that may end any time count for one step of it."""
    counts = [1] * len(program.eqns)
    for loop in loops_of(program):
        for i in range(loop.start, loop.stop) if loop.steps != UNKNOWN else ():
            counts[i] *= loop.steps
    return tuple(counts)


def in_loops(eqns: Sequence[Eqn], outs: Sequence[Var]) -> tuple[Eqn, ...]:
    """The lines of a program in an order in which those of each loop stand together.

    Without moves that no line reads. Raises `TraceError` where a value of a step is read outside of
    its loop.
    """
    if not has_loops(eqns):
        return tuple(_read(eqns, outs, lambda eqn: bool(eqn.steps)))
    return tuple(_ordered(_read(eqns, outs, lambda eqn: bool(eqn.outs)), set(outs)))


def _read(eqns: Sequence[Eqn], outs: Iterable[Var], left_out: Callable[[Eqn], bool]) -> list[Eqn]:
    """The lines without those that make what no line reads, and that may be left out."""
    needed, lines = set(outs), list[Eqn]()
    for eqn in reversed(eqns):
        if not left_out(eqn) or not needed.isdisjoint(_made(eqn)):
            lines.append(eqn)
            needed.update(eqn.ins)
    return lines[::-1]


def _ordered(eqns: list[Eqn], outs: set[Var]) -> list[Eqn]:
    first = next((eqn for eqn in eqns if eqn.op is LOOP_IN), None)
    if first is None:
        return eqns
    number = loop_number(first.args)
    own = [i for i, eqn in enumerate(eqns) if eqn.op in LOOP_OPS and _is_of(eqn, number)]
    heads = [i for i in own if eqns[i].op is LOOP_IN]
    nexts = [i for i in own if eqns[i].op is LOOP_NEXT]
    units = _units(eqns, but=number)
    carries = {v for i in heads for v in eqns[i].outs[:1] if v is not None}
    reached = _reached(eqns, units, carries, stop=nexts) - {*nexts}
    inside = reached & _needed(eqns, [v for i in nexts for v in eqns[i].ins], units)
    if reached > inside or not carries.isdisjoint(outs):
        raise _leak()
    after = _reached(eqns, units, {v for i in nexts for v in _made(eqns[i])})
    after |= {i for i in own if eqns[i].op is LOOP_OUT}
    asks = _needed(eqns, [eqns[nexts[0]].ins[0]], units) & inside
    taken = {*heads, *nexts, *inside, *after}

    def some(which: Iterable[int]) -> list[Eqn]:
        return [eqns[i] for i in sorted(which)]

    before = _ordered(some(set(range(len(eqns))) - taken), outs)
    step = [*_ordered(some(asks), outs), *_ordered(some(inside - asks), outs)]
    return [*before, *some(heads), *step, *some(nexts), *_ordered(some(after), outs)]


def made_in_steps(graph: Graph, guess: int) -> dict[int, int]:
    """How often steps compute a value, by its number; of a loop that may end any time, a guess."""
    steps: dict[object, int] = {}
    loops: dict[Var, frozenset[object]] = {}
    for call in graph.calls:
        around = frozenset[object]().union(*[loops.get(v, ()) for v in call.ins])
        if call.op is LOOP_IN:
            number = loop_number(call.args)
            steps[number] = guess if loop_steps(call.args) == UNKNOWN else loop_steps(call.args)
            around |= {number}
            made = call.outs[:1]
        elif call.op in (LOOP_NEXT, LOOP_OUT):
            around -= {loop_number(call.args)}
            made = call.outs
        else:
            made = call.outs
        if around:
            loops |= {v: around for v in made if v is not None}
    return {v.index: max(1, prod(steps[number] for number in some)) for v, some in loops.items()}


def _is_of(eqn: Eqn, number: object) -> bool:
    return loop_number(eqn.args) == number


def _made(eqn: Eqn) -> list[Var]:
    return [v for v in eqn.outs if v is not None]


Units = Mapping[int, Sequence[int]]


def _units(eqns: Sequence[Eqn], but: object = None) -> Units:
    """For each line by which a value comes into a loop or goes round, those by which all come in.

    None of these stays behind. `but` is the number of a loop that does not count.
    """
    heads: dict[object, list[int]] = {}
    nexts: dict[int, object] = {}
    for i, eqn in enumerate(eqns):
        if eqn.op in (LOOP_IN, LOOP_NEXT) and loop_number(eqn.args) != but:
            if eqn.op is LOOP_IN:
                heads.setdefault(loop_number(eqn.args), []).append(i)
            else:
                nexts[i] = loop_number(eqn.args)
    of_heads = {i: lines for lines in heads.values() for i in lines}
    return of_heads | {i: (i, *heads.get(number, ())) for i, number in nexts.items()}


def _reached(
    eqns: Sequence[Eqn], units: Units, values: set[Var], stop: Collection[int] = ()
) -> set[int]:
    """The lines that depend on some values, but not by way of the results of `stop`."""
    reached: set[int] = set()
    known, count = set(values), -1
    while len(reached) > count:  # a unit may have lines before the one that was reached
        count = len(reached)
        for i, eqn in enumerate(eqns):
            if i in reached or not known.isdisjoint(eqn.ins):
                reached.update(units.get(i, (i,)))
                known.update(v for j in units.get(i, (i,)) if j not in stop for v in _made(eqns[j]))
    return reached


def _needed(eqns: Sequence[Eqn], values: Iterable[Var], units: Units) -> set[int]:
    """The lines that make some values, and what these need."""
    needed: set[int] = set()
    wanted, count = set(values), -1
    while len(needed) > count:
        count = len(needed)
        for i in reversed(range(len(eqns))):
            if i in needed or not wanted.isdisjoint(_made(eqns[i])):
                needed.update(units.get(i, (i,)))
                wanted.update(v for j in units.get(i, (i,)) for v in eqns[j].ins)
    return needed


def _leak() -> TraceError:
    return TraceError(
        "a value of a step of a loop is read outside of it.",
        hint="Carry it: what the steps return is there after the loop.",
    )
