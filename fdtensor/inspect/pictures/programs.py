"""`of_program`: what the picture of a program says: its listing with costs, and a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fdtensor.inspect.explanation.tables import counted, microseconds
from fdtensor.inspect.pictures.facts import (
    Description,
    Facts,
    Lane,
    Note,
    Row,
    Span,
    Table,
    Timeline,
)
from fdtensor.plans.cost import CostModel
from fdtensor.plans.text import bytes_text, time_text
from fdtensor.programs.program import Program
from fdtensor.programs.sources import by_module
from fdtensor.programs.text import line_name
from fdtensor.programs.timeline import Timed, timeline
from fdtensor.programs.timeline import Timeline as Times

__all__ = ["of_program"]

MOST_LINES, MOST_COSTLY, MOST_MARKED, FINEST = 150, 60, 5, 400
"""How many lines are listed, or else of the costliest, how many of them are marked, and into how
many parts a timeline is divided."""

HOW = "a collective starts once its operand is there and is waited for when its result is read"


def of_program(program: Program, cost: CostModel | None = None) -> Description:
    """The listing of a program with the seconds of each line, and when computes what.

    Seconds are those of `cost`, by default of the model that the program was made for.
    """
    cost = cost or program.cost
    times = timeline(program, cost)
    title, *lines = str(program).split("\n")
    sections = [_facts(program, times, cost), *_modules(program, cost)]
    sections.append(_listing(lines, times.lines))
    if times.seconds > 0:
        sections += [_lanes(times), Note(HOW)]
    return Description(title, tuple(sections))


def _facts(program: Program, times: Times, cost: CostModel) -> Facts:
    computing, sending, stop = times.computing, times.sending, times.seconds
    count = counted(len(program.collectives), "collective")
    moved = f"{bytes_text(program.received_bytes)} by the busiest rank in {count}"
    time = f"{time_text(stop)} by the cost model {cost.name!r}"
    behind = computing + sending - stop
    hidden = f", {time_text(behind)} of it behind compute" if behind > 1e-9 * stop else ""
    return Facts(
        (
            ("received", moved),
            ("peak", f"{bytes_text(program.peak_bytes)} held at once by a rank"),
            ("time", time),
            ("compute", time_text(computing)),
            ("network", time_text(sending) + hidden),
        )
    )


def _modules(program: Program, cost: CostModel) -> Iterator[Table]:
    """What each module of a model amounts to; nothing for a program without modules."""
    shares = by_module(program, cost=cost)
    total = sum(share.seconds for share in shares)
    rows = []
    for share in shares:
        received = bytes_text(share.received_bytes) if share.received_bytes else ""
        cells = (share.name, str(share.lines), received, microseconds(share.seconds))
        rows.append(Row(cells, share.seconds / total if total else 0.0))
    if rows:
        yield Table(("module", "lines", "received", "time"), tuple(rows), "<>>>", bars=True)


# --- listing ---------------------------------------------------------------------------------


def _listing(lines: Sequence[str], timed: Sequence[Timed]) -> Table:
    """The lines of a program as it prints them, those of its equations with their times."""
    before = len(lines) - len(timed) - 2
    total = sum(t.seconds for t in timed)
    costly = sorted(range(len(timed)), key=lambda i: -timed[i].seconds)
    marked = {i for i in costly[:MOST_MARKED] if timed[i].seconds >= 0.1 * total > 0}
    kept = set(costly[:MOST_COSTLY] if len(timed) > MOST_LINES else costly)
    rows = [Row(("", "", line.strip())) for line in lines[:before]]
    for some in _runs(kept, len(timed)):
        time = sum(timed[i].seconds for i in some)
        share = time / total if total else 0.0
        first = some[0]
        text = lines[before + first].strip()
        if first not in kept:
            text = f"... {counted(len(some), 'line')}"
        mark = "*" if first in marked else ""
        rows.append(Row((mark, microseconds(time), text), share, first in marked))
    rows += [Row(("", "", line.strip())) for line in lines[len(lines) - 2 :]]
    return Table(("", "time", "line"), tuple(rows), "<><", bars=True)


def _runs(kept: set[int], count: int) -> Iterator[list[int]]:
    """The lines that are kept, one by one, and between them the runs of the others."""
    run: list[int] = []
    for i in range(count):
        if i not in kept:
            run.append(i)
            continue
        if run:
            yield run
        yield [i]
        run = []
    if run:
        yield run


# --- timeline --------------------------------------------------------------------------------


def _lanes(times: Times) -> Timeline:
    lanes, stop = [], times.seconds
    for name, sends in (("compute", False), ("network", True)):
        some = [t for t in times.lines if t.eqn.is_collective is sends and t.seconds > 0]
        lanes.append(Lane(name, tuple(_spans(some, stop / FINEST))))
    return Timeline(tuple(lanes), stop, time_text(stop))


def _spans(timed: Sequence[Timed], finest: float) -> Iterator[Span]:
    """The lines as spans; those shorter than `finest` together, where they touch."""
    waiting: list[Timed] = []
    for line in timed:
        short = line.seconds < finest
        if waiting and (not short or line.start - waiting[-1].stop > finest):
            yield _span(waiting)
            waiting = []
        if short:
            waiting.append(line)
            if waiting[-1].stop - waiting[0].start >= finest:
                yield _span(waiting)
                waiting = []
        else:
            yield _span([line])
    if waiting:
        yield _span(waiting)


def _span(lines: Sequence[Timed]) -> Span:
    start, stop = lines[0].start, lines[-1].stop
    took = f"{time_text(start)} to {time_text(stop)}"
    if len(lines) > 1:
        names = f"{_out(lines[0])} to {_out(lines[-1])}"
        return Span(start, stop, "", f"{counted(len(lines), 'line')}, {names}: {took}")
    eqn = lines[0].eqn
    return Span(start, stop, _out(lines[0]), f"{_out(lines[0])} = {line_name(eqn)}: {took}")


def _out(line: Timed) -> str:
    return next((str(v) for v in line.eqn.outs if v is not None), "_")
