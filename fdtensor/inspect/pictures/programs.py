"""`of_program`: what the picture of a program says: its listing with costs, and a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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
from fdtensor.inspect.pictures.folds import Fold, folds
from fdtensor.plans.cost import CostModel
from fdtensor.plans.text import bytes_text, time_text
from fdtensor.programs.program import Program
from fdtensor.programs.sources import by_module, sources
from fdtensor.programs.text import line_name
from fdtensor.programs.timeline import Timed, timeline
from fdtensor.programs.timeline import Timeline as Times

__all__ = ["of_program"]

MOST_NAMES = 24
"""How many inputs and results are listed by name."""

MOST_LINES, MOST_COSTLY, MOST_MARKED, FINEST = 150, 60, 5, 400
"""How many lines are listed, or else of the costliest, how many of them are marked, and into how
many parts a timeline is divided."""

UNFOLDED, FEWEST = 40, 8
"""Programs of so many lines are listed without looking for repeats, and so many lines at least are
left out of others for one."""

HOW = "a collective starts once its operand is there and is waited for when its result is read"


def of_program(program: Program, cost: CostModel | None = None) -> Description:
    """The listing of a program with the seconds of each line, and when computes what.

    Seconds are those of `cost`, by default of the model that the program was made for.
    """
    cost = cost or program.cost
    times = timeline(program, cost)
    title, *lines = str(program).split("\n")
    sections = [_facts(program, times, cost), *_modules(program, cost)]
    sections.append(_listing(program, lines, times.lines))
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


def _listing(program: Program, lines: Sequence[str], timed: Sequence[Timed]) -> Table:
    """The lines of a program as it prints them, those of its equations with their times.

    Copies of the same lines are listed once, with the share of all of them.
    """
    before = len(lines) - len(timed) - 2
    copies = _copies(program, timed)
    seconds, marked, kept = _costly(timed, copies)
    copies = [fold for fold in copies if not kept.isdisjoint(_first(fold))]
    heads = {fold.start: fold for fold in copies}
    inside = {i for fold in copies for i in _first(fold)}
    rows = [Row(("", "", _short(line.strip()))) for line in lines[:before]]
    for some in _runs(kept, _listed(copies, len(timed)), heads):
        first = some[0]
        if first in heads:
            rows.append(_head(program, heads[first], timed))
        text = _short(lines[before + first].strip())
        if first not in kept:
            text = f"... {counted(len(some), 'line')}"
        text = "    " * (first in inside) + text
        time = microseconds(sum(timed[i].seconds for i in some))
        share = sum(seconds[i] for i in some) / (sum(seconds) or 1.0)
        rows.append(Row(("*" * (first in marked), time, text), share, first in marked))
    rows += [Row(("", "", _short(line.strip()))) for line in lines[len(lines) - 2 :]]
    return Table(("", "time", "line"), tuple(rows), "<><", bars=True)


def _short(line: str) -> str:
    """A line without the values in the middle, where there are many."""
    gap = " " if line.startswith("out ") else "  "
    words, kept = line.split(gap), MOST_NAMES // 2
    if len(words) <= MOST_NAMES:
        return line
    left_out = f"... {len(words) - 2 * kept} more ..."
    return gap.join([*words[:kept], left_out, *words[-kept:]])


def _costly(
    timed: Sequence[Timed], copies: Sequence[Fold]
) -> tuple[list[float], set[int], set[int]]:
    """The seconds of each line with those of its copies, the marked lines, and the listed ones."""
    seconds = [t.seconds for t in timed]
    for fold in copies:
        for i in _first(fold):
            seconds[i] *= fold.count
        for i in range(fold.start + fold.period, fold.stop):
            seconds[i] = 0.0
    listed = _listed(copies, len(timed))
    costly = sorted(listed, key=lambda i: -seconds[i])
    marked = {i for i in costly[:MOST_MARKED] if seconds[i] >= 0.1 * sum(seconds) > 0}
    return seconds, marked, set(costly[:MOST_COSTLY] if len(listed) > MOST_LINES else costly)


def _first(fold: Fold) -> range:
    return range(fold.start, fold.start + fold.period)


def _copies(program: Program, timed: Sequence[Timed]) -> list[Fold]:
    """Where lines repeat: the same ops of values of the same types."""
    if len(timed) <= UNFOLDED:
        return []
    keys = [(line_name(t.eqn), *(v and program.type_of(v) for v in t.eqn.outs)) for t in timed]
    return folds(keys, max(FEWEST, len(timed) // 50))


def _listed(copies: Sequence[Fold], count: int) -> list[int]:
    """The lines outside of copies, and those of first copies."""
    others = {i for fold in copies for i in range(fold.start + fold.period, fold.stop)}
    return [i for i in range(count) if i not in others]


def _head(program: Program, fold: Fold, timed: Sequence[Timed]) -> Row:
    """What is said above the first of several copies."""
    middle = fold.start + fold.period // 2  # a copy may begin with the end of the layer before
    modules = [source.module for source in sources(program)]
    told = _between(modules[middle], modules[middle + fold.period * (fold.count - 1)])
    text = f"{fold.count} times {counted(fold.period, 'line')}{told}, the first:"
    time = sum(t.seconds for t in timed[fold.start : fold.stop])
    return Row(("", microseconds(time), text))


def _between(first: str, last: str) -> str:
    """The layers of the first and the last copy: their modules up to the number that differs."""
    a, b = first.split("."), last.split(".")
    for depth, pair in enumerate(zip(a, b, strict=False), 1):
        if pair[0] != pair[1]:
            layers = all(map(str.isdigit, pair))
            return f", {'.'.join(a[:depth])} to {'.'.join(b[:depth])}" if layers else ""
    return ""


def _runs(kept: set[int], listed: Sequence[int], heads: Mapping[int, Fold]) -> Iterator[list[int]]:
    """The lines that are kept, one by one, and between them the runs of the others.

    No run goes over the border of a copy.
    """
    borders = {*heads, *(fold.stop for fold in heads.values())}
    run: list[int] = []
    for i in listed:
        if run and (i in borders or i in kept):
            yield run
            run = []
        if i in kept:
            yield [i]
        else:
            run.append(i)
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
