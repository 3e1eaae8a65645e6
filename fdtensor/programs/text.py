"""A program as text: its values with their types, line by line, and the bytes that it sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fdtensor.ops.graph import Var, argument_text
from fdtensor.ops.loop_ops import LOOP_IN, UNKNOWN, loop_steps
from fdtensor.plans.text import bytes_text, time_text
from fdtensor.plans.traffic import most_received
from fdtensor.programs.conditional import conditions
from fdtensor.programs.loops import loops_of, times
from fdtensor.programs.sources import by_module
from fdtensor.programs.strategy import strategy

if TYPE_CHECKING:
    from fdtensor.programs.eqn import Eqn
    from fdtensor.programs.program import Program

__all__ = ["line_count", "line_name", "op_name", "summary", "text_of"]


def text_of(program: Program) -> str:
    """The program as aligned lines, as `print` shows it."""

    def typed(v: Var | None) -> str:
        return "_" if v is None else f"{v}:{program.type_of(v)}"

    lines = [f"{program.name} on {program.mesh!r}"]
    lines.append("  in   " + "  ".join(map(typed, program.inputs)))
    if program.constants:
        lines.append("  with " + "  ".join(typed(v) for v, _ in program.constants))
    rows: list[tuple[str, str, str]] = []
    when = conditions(program)
    loops = loops_of(program)
    for number, eqn in enumerate(program.eqns):
        left = "  " * sum(loop.start <= number < loop.stop for loop in loops)
        left += "  ".join(map(typed, eqn.outs))
        if eqn.steps:
            right, moved = f"{eqn.op.collective} {' '.join(map(str, eqn.ins))}", _moved(eqn)  # type: ignore[union-attr]
        else:
            arguments = argument_text(_told(eqn), eqn.kwargs)
            right, moved = f"{op_name(eqn.op)} {arguments}".rstrip(), ""
        rows.append(
            (
                left,
                right,
                "  ".join(filter(None, [moved, eqn.note, _condition(when.get(number, ()))])),
            )
        )
    width = min(48, max((len(left) for left, _, _ in rows), default=0))
    for left, right, moved in rows:
        equals = "=" if left else " "
        lines.append(f"  {left:<{width}} {equals} {right}" + (f"  {moved}" if moved else ""))
    lines.append("  out  " + " ".join(map(str, program.outs)))
    return "\n".join([*lines, _total(program)])


def _told(eqn: Eqn) -> tuple[object, ...]:
    """The arguments of a line, without the number of steps of a loop where none is known."""
    if eqn.op is LOOP_IN and loop_steps(eqn.args) == UNKNOWN:
        return eqn.args[0], eqn.args[-1]
    return eqn.args


def _condition(asked: Iterable[tuple[Var, bool]]) -> str:
    """Under which predicates a line runs."""
    told = [str(v) if holds else f"not {v}" for v, holds in asked]
    return f"if {' and '.join(told)}" if told else ""


def _moved(eqn: Eqn) -> str:
    return bytes_text(most_received(eqn.steps)) if eqn.is_collective else ""


def line_count(program: Program) -> str:
    """How many lines a program has, as a text."""
    count = len(program.eqns)
    return f"{count} line{'s' * (count != 1)}"


def _total(program: Program) -> str:
    count = len(program.collectives)
    plural = "collective" if count == 1 else "collectives"
    unknown = any(loop.steps == UNKNOWN for loop in loops_of(program))
    each = ", those of a while_loop in each step" if unknown else ""
    return f"{count} {plural}, {bytes_text(program.received_bytes)} received per rank{each}"


def op_name(op: object) -> str:
    """The name of an op as programs print it: `mm`, `sum.dim_IntList`, `mylib.op`."""
    return str(op).removeprefix("aten.").removesuffix(".default")


def line_name(eqn: Eqn) -> str:
    """What a line does: the name of its op, or its collective."""
    return str(eqn.op.collective) if eqn.steps else op_name(eqn.op)  # type: ignore[union-attr]


def summary(program: Program) -> str:
    """The collectives by kind, and what each module of a model amounts to: one screen."""
    counts: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()
    for eqn, often in zip(program.eqns, times(program), strict=True):
        if eqn.is_collective:
            kind, _, rest = str(eqn.op.collective).partition("[")  # type: ignore[union-attr]
            axes = rest.partition("=")[2].partition(" ")[0].rstrip("]")
            counts[kind, axes] += often
            moved[kind, axes] += often * most_received(eqn.steps)
    lines = [f"{program.name} on {program.mesh!r}: {line_count(program)}"]
    for (kind, axes), count in sorted(counts.items()):
        size = bytes_text(moved[kind, axes])
        lines.append(f"  {count:4} {kind:<15} over {axes:<10} {size:>12} received per rank")
    lines.append(
        f"{_total(program)}, peak {bytes_text(program.peak_bytes)}, "
        f"{time_text(program.seconds)} on {program.cost.name}"
    )
    told = strategy(program)
    return "\n".join([*lines, *_modules(program), *([told] if told else [])])


def _modules(program: Program) -> list[str]:
    """A table of the modules, equal layers together; nothing for a program without modules."""
    shares = by_module(program)
    if not shares:
        return []
    rows = [("module", "lines", "received", "compute", "network")]
    for share in shares:
        received = bytes_text(share.received_bytes) if share.received_bytes else ""
        computing, sending = (time_text(s) if s else "" for s in (share.computing, share.sending))
        rows.append((share.name, str(share.lines), received, computing, sending))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
