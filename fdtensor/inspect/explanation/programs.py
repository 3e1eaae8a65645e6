"""`explained`: why the values of a program have their layouts, and what others would cost."""

from __future__ import annotations

from collections.abc import Iterator

from fdtensor.inspect.explanation.moves import move_lines
from fdtensor.inspect.explanation.options import decisions
from fdtensor.inspect.explanation.smallness import small_values
from fdtensor.inspect.explanation.tables import counted
from fdtensor.inspect.explanation.values import Block, blocks_of, laid, name_made_by
from fdtensor.ops.graph import Var
from fdtensor.ops.notation.core import rule_of
from fdtensor.ops.pins import pinned
from fdtensor.plans.text import time_text
from fdtensor.programs.assembly import Origin
from fdtensor.programs.bound.least import bound_of
from fdtensor.programs.choices import Body
from fdtensor.programs.names import value_named
from fdtensor.programs.program import Program
from fdtensor.programs.strategy import strategy

__all__ = ["explained"]

VALUES, ROWS = 8, 3
"""How many values, and how many other rows of a value, are told at most."""

NO_GAP = 1e-4
"""The part of the seconds that counts as nothing."""

LEGEND = "seconds as the choice saw them; + is what the whole would take more"


def explained(program: Program, value: str | None = None) -> str:
    """Why values have their layouts: the costly moves, the rows taken, what others would cost.

    All of one value where `value` is its name in the program's text. A row is priced while all
    other calls keep theirs: its compute, and the moves that only this call needs. Seconds are
    those that the choice was made by: most of a launch passes behind other work. The last line
    says how far the choice is at most from the best of all combinations of rows on all axes.
    Raises `TraceError` for a name that the program does not have.
    """
    if value is not None:
        return _of_value(program, value)
    lines = [f"{program.name} on {program.mesh!r}", "", *move_lines(program), ""]
    if program.origin is None:
        return "\n".join(
            [*lines, "what the layouts were chosen from is not known: it was not traced here"]
        )
    blocks = blocks_of(program, ROWS)
    if not blocks:
        repeated = program.origin.repeats is not None
        none = "no layout was a choice: every call has one row"
        return "\n".join([*lines, _best(program) if repeated else none])
    shown = sorted(blocks, key=lambda block: block.weight, reverse=True)[:VALUES]
    shown.sort(key=lambda block: block.calls)
    count = sum(len(block.calls) for block in blocks)
    title = f"{counted(count, 'call')} with several rows"
    if len(shown) < len(blocks):
        title += "; these move most, or would"
    lines += [title, f"({LEGEND})"]
    lines += laid([row for block in shown for row in block.cells(program, ROWS)])
    name = name_made_by(program, shown[0].calls[0])
    lines += ["", f"program.explain({name!r}) has all rows of one value"]
    return "\n".join([*lines, *_small(program), *filter(None, [strategy(program)]), _best(program)])


def _small(program: Program) -> Iterator[str]:
    """Which values are whole on every rank for their sizes alone, a line for each axis."""
    for axis, values in small_values(program).items():
        names = ", ".join(map(str, values[:VALUES])) + (", ..." if len(values) > VALUES else "")
        yield f"whole along {axis} only since small: {names} (as_if= chooses for other sizes)"


def _best(program: Program) -> str:
    """How far the choice is from the best one at most, in a line."""
    origin: Origin = program.origin
    if origin.repeats is not None:
        return f"the choice is that of the program at other sizes, {_best(origin.repeats)}"
    if origin.constraints.follow:
        return "the layouts that were given decide (choice='follow'), not the seconds"
    best = bound_of(origin.choices, origin.regather)
    least = "the best possible by this cost model"
    if any(not call.outs for call in origin.graph.calls):
        least += ", checks of values aside: they have no price"
    if best.gap < NO_GAP:
        return least
    if best.gap > 0.99:  # of a program of microseconds the bound may be near 0
        return f"at most {time_text(best.chosen - best.least)} above {least}"
    return f"within {100 * best.gap:.2g} % of {least}"


def _of_value(program: Program, name: str) -> str:
    """All about the value of this name: from where it was moved, what it was made by."""
    var = value_named(program, name)
    moves = {
        after: (before, step.collective)
        for eqn in program.eqns
        if eqn.steps
        for step, before, after in zip(eqn.steps, eqn.ins, eqn.outs, strict=True)
    }
    head, lines = f"{var}:{program.type_of(var)}", []
    lines += [f"  {var} {why}" for why in _asked_for(program, var)]
    while var in moves:
        before, collective = moves[var]
        lines.append(f"  {var} is {before} moved: {collective}")
        var = before
    if var in program.inputs:
        lines.append(f"  {var} is an input: its layout is given")
    elif any(var == v for v, _ in program.constants):
        lines.append(f"  {var} is a tensor that {program.name} closes over: replicated")
    elif program.origin is None:
        lines.append("  is not known to be chosen: the program was not traced here")
    else:
        rows = _made(program, var)
        if not lines and rows[0].strip().startswith(head):
            head, *rows = "\n".join(rows).lstrip().split("\n")
        lines += rows
    source = program.source(var)
    lines[:0] = [f"  {source}"] if source.module else []
    return "\n".join([head, *lines])


def _asked_for(program: Program, v: Var) -> Iterator[str]:
    """The layouts of a value that the caller or the function asked for."""
    if program.origin is None:
        return
    origin: Origin = program.origin
    for i, (out, want) in enumerate(zip(program.outs, origin.wants, strict=True)):
        if out == v:
            yield f"is output {i}, its layout " + ("chosen" if want is None else "asked for")
    pins = [call.outs[0] for call in origin.graph.calls if pinned(call) is not None]
    if any(p is not None and origin.values[p] == v for p in pins):
        yield "is pinned by constrain"


def _made(program: Program, var: Var) -> list[str]:
    """The call that made a value, with all its rows; or in whose decomposition it was made."""
    origin: Origin = program.origin
    results = [
        (i, [origin.values[v] for v in call.outs if v is not None])
        for i, call in enumerate(origin.graph.calls)
        if pinned(call) is None
    ]
    i, outs = next((i, vs) for i, vs in results if any(v.index >= var.index for v in vs))
    call = origin.graph.calls[i]
    lines = []
    if var not in outs:
        lines.append(f"  {var} is a line of the decomposition that makes {outs[0]}")
    of_call = tuple(d for d in decisions(program) if d.call == i)
    title, *rows = Block((i,), of_call).cells(program)
    head, *table = laid(rows)
    rule = rule_of(call.op)
    formula = (rule.rows.__doc__ or "").strip().partition("\n")[0] if rule else ""
    lines += [
        f"  {title[0]}",
        *([f"  {formula}"] if formula else []),
        f"  ({LEGEND})",
        head,
        *table,
    ]
    if any(isinstance(d.taken.option.note, Body) for d in of_call):
        lines.append("  compute of a decomposition has the moves inside")
    return lines
