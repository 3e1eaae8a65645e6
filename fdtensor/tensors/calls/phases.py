"""`phases`: a program cut into parts, each of which runs when its inputs have come in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from fdtensor.ops.graph import Var
from fdtensor.ops.loop_ops import LOOP_IN, LOOP_OUT
from fdtensor.ops.saved_values import ALIAS
from fdtensor.programs.bundles import bundled, unbundled
from fdtensor.programs.loops import loops_of
from fdtensor.programs.program import Eqn, Program, is_view_line
from fdtensor.programs.schedule import scheduled

__all__ = ["Cut", "Phase", "phases"]


@attrs.frozen
class Cut:
    """A part to cut off: its name, the inputs that come in for it, and what it is to give."""

    name: str
    inputs: tuple[Var, ...]
    outs: tuple[Var, ...]
    lazy: bool = False
    """Whether lines that could run in it, but are read later alone, run then."""


@attrs.frozen(eq=False)
class Phase:
    """A part of a program: `takes` and `gives` are its inputs and outputs as values of the whole.

    It takes inputs of earlier parts, then what these computed, then its own inputs; it gives what
    was asked of it, then what later parts take. Views are taken again, and not kept.
    """

    program: Program
    takes: tuple[Var, ...]
    gives: tuple[Var, ...]


def phases(whole: Program, cuts: Sequence[Cut]) -> list[Phase]:
    """The parts of a program, in order: a line is in the first one that has its operands.

    What takes a saved value again runs as late as it can.
    """
    whole = unbundled(whole)  # what travels together may be of several parts
    inputs = {v: i for i, cut in enumerate(cuts) for v in cut.inputs}
    lines = _parts(whole, cuts, inputs)
    reading = _Reading(whole, lines, inputs)
    reads = [
        reading.of(i, [*(v for eqn in part for v in eqn.ins), *cuts[i].outs])
        for i, part in enumerate(lines)
    ]
    cut_off: list[Phase] = []
    for i, cut in enumerate(cuts):
        again, of_inputs, of_lines = reads[i]
        later = dict.fromkeys(v for _, _, rest in reads[i + 1 :] for v in rest)
        kept = [v for v in later if reading.at[v] == i]
        order = [v for v in whole.inputs if v in of_inputs]
        takes, gives = (*order, *of_lines, *cut.inputs), (*cut.outs, *kept)
        repeated = [eqn for eqn in whole.eqns if id(eqn) in again]
        program = _part(whole, cut.name, takes, [*repeated, *lines[i]], gives)
        cut_off.append(Phase(program, takes, gives))
    return cut_off


def _parts(whole: Program, cuts: Sequence[Cut], inputs: Mapping[Var, int]) -> list[list[Eqn]]:
    """The lines of each part."""
    soonest = dict(inputs)  # where lines could be, of which checks are
    for eqn in whole.eqns:
        soonest.update((v, _last(soonest, eqn)) for v in eqn.outs if v is not None)
    needed: list[set[int]] = []
    outs: list[Var] = []
    for i, cut in enumerate(cuts):
        outs += cut.outs
        due = [eqn for eqn in whole.eqns if eqn.outs or _last(soonest, eqn) <= i]
        needed.append(_needed(due, outs))
    at, lines = dict(inputs), [[] for _ in cuts]
    for some in _together(whole):
        place = max(_last(at, eqn) for eqn in some)
        late = some[0].op is ALIAS or cuts[place].lazy
        if late and some[0].op is not LOOP_OUT:  # which is where its loop is
            ids = {id(eqn) for eqn in some}
            reader = next((i for i, due in enumerate(needed) if ids & due), len(cuts) - 1)
            place = max(place, reader)
        lines[place] += some
        at.update((v, place) for eqn in some for v in eqn.outs if v is not None)
    return lines


def _together(whole: Program) -> list[Sequence[Eqn]]:
    """The lines of a program, those of a loop together."""
    groups: list[Sequence[Eqn]] = []
    stop = 0
    for loop in loops_of(whole):
        if loop.start >= stop:  # else inside of the one before
            start = loop.start - 1
            while start > stop and whole.eqns[start - 1].op is LOOP_IN:
                start -= 1
            groups += [[eqn] for eqn in whole.eqns[stop:start]]
            stop = loop.stop
            groups.append(whole.eqns[start:stop])
    return [*groups, *([eqn] for eqn in whole.eqns[stop:])]


def _last(at: Mapping[Var, int], eqn: Eqn) -> int:
    """The part at which all operands of a line are there."""
    return max((at.get(v, 0) for v in eqn.ins), default=0)


class _Reading:
    """What parts read of others."""

    def __init__(
        self, whole: Program, lines: Sequence[Sequence[Eqn]], inputs: Mapping[Var, int]
    ) -> None:
        self.inputs = inputs
        self.constants = {v for v, _ in whole.constants}
        self.maker = {v: eqn for eqn in whole.eqns for v in eqn.outs if v is not None}
        self.at = dict(inputs)
        """The part in which each value comes up."""
        for i, part in enumerate(lines):
            self.at.update((v, i) for eqn in part for v in eqn.outs if v is not None)

    def of(
        self, part: int, values: Iterable[Var]
    ) -> tuple[set[int], dict[Var, None], dict[Var, None]]:
        """The views, by id, that a part takes again for these values; and what it reads.

        That is inputs of earlier parts, and what lines of these have computed.
        """
        again, of_inputs, of_lines = set[int](), dict[Var, None](), dict[Var, None]()
        todo = list(values)[::-1]
        while todo:
            v = todo.pop()
            if v in self.constants or self.at[v] == part:
                continue
            if v in self.inputs:
                of_inputs[v] = None
            elif is_view_line(self.maker[v]):
                if id(self.maker[v]) not in again:
                    again.add(id(self.maker[v]))
                    todo += self.maker[v].ins[::-1]
            else:
                of_lines[v] = None
        return again, of_inputs, of_lines


def _needed(eqns: Sequence[Eqn], outs: Iterable[Var]) -> set[int]:
    """The ids of the lines that these outputs need, and of all checks."""
    needed, lines = set(outs), set[int]()
    for eqn in reversed(eqns):
        if not eqn.outs or any(v in needed for v in eqn.outs if v is not None):
            lines.add(id(eqn))
            needed.update(eqn.ins)
    return lines


def _part(
    whole: Program, name: str, inputs: Sequence[Var], eqns: Sequence[Eqn], outs: Sequence[Var]
) -> Program:
    """The lines that these outputs need, as a program of its own."""
    kept = _needed(eqns, outs)
    lines = [eqn for eqn in eqns if id(eqn) in kept]
    needed = {*outs, *(v for eqn in lines for v in eqn.ins)}
    part = attrs.evolve(
        whole,
        name=f"{whole.name}.{name}",
        inputs=tuple(inputs),
        constants=tuple(pair for pair in whole.constants if pair[0] in needed),
        eqns=tuple(lines),
        outs=tuple(outs),
    )
    part = scheduled(bundled(part))
    return attrs.evolve(part, origin=None)  # that of the whole is not its own
