"""`conditions`: which lines of a program need not run, since only what is not selected reads them.

A line that `SELECT` alone reads, as the operand of one branch, runs where its predicate says so.
The predicate is the same on all ranks, so collectives may be among these lines.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fdtensor.layouts.remembered import while_alive
from fdtensor.ops.graph import Var
from fdtensor.ops.loop_ops import LOOP_OPS
from fdtensor.ops.select import SELECT

if TYPE_CHECKING:
    from fdtensor.programs.program import Eqn, Program

__all__ = ["Conditions", "conditions"]

Conditions = frozenset[tuple[Var, bool]]
"""Predicates, each with what it must be; none means always."""

ALWAYS: Conditions = frozenset()


@while_alive(512)
def conditions(program: Program) -> Mapping[int, tuple[tuple[Var, bool], ...]]:
    """The conditions under which lines run, sorted, by their numbers; without those that always do.

    A predicate counts for the lines after it alone: what comes before runs in any case.
    """
    if not any(eqn.op is SELECT for eqn in program.eqns):
        return {}
    when: dict[Var, Conditions] = dict.fromkeys(program.outs, ALWAYS)
    of_lines: dict[int, Conditions] = {}
    known = {v: i for i, eqn in enumerate(program.eqns) for v in eqn.outs if v is not None}
    for i in reversed(range(len(program.eqns))):
        eqn = program.eqns[i]
        read = [when[v] for v in eqn.outs if v is not None and v in when]
        own = functools.reduce(lambda a, b: a & b, read) if read else ALWAYS
        own = ALWAYS if eqn.op in LOOP_OPS else own  # a loop makes no steps where it does not count
        of_lines[i] = frozenset(c for c in own if known.get(c[0], -1) < i)
        for v, condition in _operands(eqn, own):
            when[v] = when[v] & condition if v in when else condition
    return {i: tuple(sorted(own, key=_place)) for i, own in of_lines.items() if own}


def _place(condition: tuple[Var, bool]) -> tuple[int, bool]:
    """By what conditions are sorted: sets have another order in each process."""
    which, holds = condition
    return which.index, not holds


def _operands(eqn: Eqn, own: Conditions) -> list[tuple[Var, Conditions]]:
    """What a line reads, and when it does."""
    if eqn.op is not SELECT:
        return [(v, own) for v in eqn.ins]
    which, first, second = eqn.ins
    return [(which, own), (first, own | {(which, True)}), (second, own | {(which, False)})]
