"""`Block`: a call of a traced function, with what its rows cost on each axis, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from fdtensor.inspect.explanation.options import Decision, Priced, decisions
from fdtensor.inspect.explanation.tables import columns, microseconds, row_text
from fdtensor.ops.graph import argument_text, substituted
from fdtensor.plans.text import bytes_text
from fdtensor.programs.assembly import Origin
from fdtensor.programs.program import Program, op_name

__all__ = ["Block", "blocks_of", "laid", "name_made_by"]

Cells = tuple[str, ...]
"""A row of the table; or a title, alone."""


@attrs.frozen
class Block:
    """Calls whose decisions read alike, and these decisions: those of the first of them."""

    calls: tuple[int, ...]
    decisions: tuple[Decision, ...]

    @property
    def weight(self) -> tuple[float, float]:
        """The seconds that its moves take, and those that its next best rows would add."""
        more = [d.others[0].seconds - d.taken.seconds for d in self.decisions if d.others]
        return sum(d.taken.moves for d in self.decisions), sum(more)

    def cells(self, program: Program, most: int | None = None) -> list[Cells]:
        """A title, then for each axis the row taken and at most so many others."""
        title = _title(program, self.calls[0])
        if len(self.calls) > 1:
            names = [name_made_by(program, i) for i in self.calls[1:4]]
            title += f"  (so too {', '.join(names)}{' ...' * (len(self.calls) > 4)})"
        rows: list[Cells] = [(title,)]
        for decision in self.decisions:
            rows += _decided(decision, most)
        return rows


def blocks_of(program: Program, most: int) -> list[Block]:
    """The calls with several rows, in order; alike if the first `most` other rows read alike."""
    by_call: dict[int, list[Decision]] = {}
    for decision in decisions(program):
        if decision.others:
            by_call.setdefault(decision.call, []).append(decision)
    alike: dict[object, list[int]] = {}
    for i, several in by_call.items():
        text = tuple(tuple(_decided(d, most)) for d in several)
        alike.setdefault((program.origin.graph.calls[i].op, text), []).append(i)
    return [Block(tuple(calls), tuple(by_call[calls[0]])) for calls in alike.values()]


def laid(cells: Sequence[Cells]) -> list[str]:
    """Titles, with the rows below them in the same columns; the first line heads the columns."""
    head = ("", "", "compute", "moves", "received", "")
    lines = iter(columns([head, *(row for row in cells if len(row) > 1)], "<<>>>>", indent=4))
    return [next(lines), *(next(lines) if len(row) > 1 else "  " + "".join(row) for row in cells)]


def name_made_by(program: Program, i: int) -> str:
    """The name, in the program, of the first value that call `i` makes."""
    origin: Origin = program.origin
    return str(next(origin.values[v] for v in origin.graph.calls[i].outs if v is not None))


def _decided(decision: Decision, most: int | None) -> list[Cells]:
    rows: list[Cells] = [(decision.axis, *_priced(decision.taken), "taken")]
    for other in decision.others[:most]:
        undoes = other.tolls > decision.taken.tolls
        more = microseconds(other.seconds - decision.taken.seconds, "+")
        more = "undoes what is given" if undoes else more
        rows.append(("", *_priced(other), more))
    return rows


def _priced(priced: Priced) -> Cells:
    return (
        row_text(priced.option),
        microseconds(priced.compute),
        microseconds(priced.moves),
        bytes_text(priced.received_bytes),
    )


def _title(program: Program, i: int) -> str:
    """A call as a line of the program, with its values as they were first made."""
    origin: Origin = program.origin
    call = origin.graph.calls[i]
    results = [origin.values[v] for v in call.outs if v is not None]
    left = "  ".join(f"{v}:{program.type_of(v)}" for v in results[:2]) + "  ..." * (
        len(results) > 2
    )
    args, kwargs = substituted((call.args, call.kwargs), lambda v: origin.values[v])
    text = argument_text(args, kwargs)
    text = text if len(text) <= 30 else f"{text[:26]} ..."
    return f"{left} = {op_name(call.op)} {text}".rstrip()
