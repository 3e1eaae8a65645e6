"""`move_lines`: the collectives of a program, the most expensive first, with what they are for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from fdtensor.inspect.explanation.tables import columns, counted, microseconds
from fdtensor.ops.graph import Var
from fdtensor.plans.collectives import Step
from fdtensor.plans.cost import linked, seconds
from fdtensor.plans.cost_parts import HIDDEN, overlapped
from fdtensor.plans.text import bytes_text
from fdtensor.plans.traffic import most_received
from fdtensor.programs.program import Program, Together, op_name

__all__ = ["move_lines"]

MOST = 12
"""How many moves are told."""


def move_lines(program: Program) -> list[str]:
    """A title and a table: each move, its seconds and bytes, who makes the value and who reads it.

    A title alone where nothing is sent.
    """
    price = overlapped(linked(program.cost, program.mesh))
    sent = [
        (sum(seconds(step, price) for step in eqn.steps), eqn)
        for eqn in program.eqns
        if eqn.is_collective
    ]
    if not sent:
        return ["nothing is sent"]
    title = f"{counted(len(sent), 'move')}, {microseconds(sum(spent for spent, _ in sent))}"
    title += f", launches and latencies counted {Fraction(HIDDEN)}: the rest passes behind work"
    if len(sent) > MOST:
        title += f"; these {MOST} cost most"
    makers, readers = _makers(program), _readers(program)
    rows = [("", "", "received", "made by -> read by")]
    for spent, eqn in sorted(sent, key=lambda move: -move[0])[:MOST]:
        assert isinstance(eqn.op, (Step, Together))
        values = [v for v in eqn.outs if v is not None]
        read_by = [reader for v in values for reader in readers.get(v, ())]
        ends = f"{_some([makers[v] for v in values])} -> {_some(read_by)}"
        call = f"{_values(values)} = {eqn.op.collective} {_values(eqn.ins)}"
        rows.append((call, microseconds(spent), bytes_text(most_received(eqn.steps)), ends))
    return [title, *columns(rows, "<>><")]


def _makers(program: Program) -> dict[Var, str]:
    """The op that made each value, before it was moved."""
    makers = dict.fromkeys(program.inputs, "input")
    makers.update((v, "constant") for v, _ in program.constants)
    for eqn in program.eqns:
        if eqn.steps:
            makers.update(
                (w, makers[v]) for v, w in zip(eqn.ins, eqn.outs, strict=True) if w is not None
            )
        else:
            makers.update((v, op_name(eqn.op)) for v in eqn.outs if v is not None)
    return makers


def _readers(program: Program) -> dict[Var, list[str]]:
    """The ops that read each value, after it was moved on; "output" for the caller."""
    readers: dict[Var, list[str]] = {v: ["output"] for v in program.outs}
    for eqn in reversed(program.eqns):
        names_of = {v: [op_name(eqn.op)] for v in eqn.ins}
        if eqn.steps:
            names_of = {
                v: readers.get(w, [])
                for v, w in zip(eqn.ins, eqn.outs, strict=True)
                if w is not None
            }
        for v, names in names_of.items():
            readers[v] = [*names, *readers.get(v, [])]
    return readers


def _values(values: Sequence[Var]) -> str:
    return " ".join(map(str, values)) if len(values) < 4 else f"{values[0]} +{len(values) - 1}"


def _some(names: Iterable[str]) -> str:
    known = list(dict.fromkeys(names))
    return ", ".join(known if len(known) < 2 else [known[0], f"{len(known) - 1} more"])
