"""`python -m tests.bench choice`: the programs chosen for large functions, and the time it takes.

Nothing is computed: functions are traced on types of their real sizes, each in a process of its own
that has traced nothing before. Seconds are those of the processor, so that a busy machine does not
count. The gap is what the choice takes more than the best of all combinations of rows, at most.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable

import attrs
from rich.console import Console
from rich.table import Table

from fdtensor.programs.bound.least import bound_of
from fdtensor.programs.tracer import trace
from tests.bench.choice_cases import CASES, LAYERED

__all__ = ["FULL", "QUICK", "Chosen", "Effort", "Found", "measure", "show", "total"]


@attrs.frozen
class Effort:
    """How much a run measures."""

    cases: tuple[tuple[str, int], ...]
    """The name of a case, and the number of one of its meshes."""


FULL = Effort(tuple((c.name, i) for c in (*CASES, *LAYERED) for i in range(len(c.meshes))))
QUICK = Effort(tuple((case.name, 0) for case in CASES))


@attrs.frozen
class Chosen:
    """A program, and how long it took to choose it."""

    case: str
    mesh: str
    received_bytes: int
    """By the rank that receives the most."""
    collectives: int
    moves_ms: float
    """What its collectives take by the cost model."""
    cold_s: float
    """In a process that has traced nothing."""
    again_s: float
    """Traced anew in the same process."""
    gap: float
    """The part that the choice takes more than the best one, at most, by its prices."""
    proof_s: float
    """How long it takes to prove that."""


@attrs.frozen
class Found:
    """What a run measured."""

    programs: tuple[Chosen, ...]


def total(effort: Effort) -> int:
    """The number of measurements."""
    return len(effort.cases)


def measure(effort: Effort, tick: Callable[..., None] = lambda *_: None) -> Found:
    """All cases; `tick(doing, done)` is called before each, and after it with done = 1."""
    rows: list[Chosen] = []
    spawn = multiprocessing.get_context("spawn")
    for name, mesh in effort.cases:
        tick(name, 0)
        with spawn.Pool(1) as pool:
            rows.append(pool.apply(chosen, (name, mesh)))
        tick(name, 1)
    return Found(tuple(rows))


def chosen(name: str, number: int) -> Chosen:
    """The program of a case on one of its meshes."""
    (case,) = (case for case in (*CASES, *LAYERED) if case.name == name)
    mesh = case.meshes[number]
    start = time.process_time()
    program = trace(case.f, *case.types(mesh))
    cold = time.process_time() - start
    trace(case.f, *case.types(mesh))
    again = time.process_time() - start - cold
    count, spent = len(program.collectives), program.seconds * 1e3
    start = time.process_time()
    gap = bound_of(program.origin.choices).gap
    proof = time.process_time() - start
    return Chosen(name, str(mesh), program.received_bytes, count, spent, cold, again, gap, proof)


def show(console: Console, found: Found) -> None:
    """A table of the programs."""
    table = Table(title="chosen for every rank; CPU seconds to trace, in a fresh process and again")
    for column in ("case", "mesh"):
        table.add_column(column)
    for column in ("received MB", "collectives", "moves ms", "cold s", "again s", "gap", "proof s"):
        table.add_column(column, justify="right")
    for row in found.programs:
        table.add_row(
            *(row.case, row.mesh, f"{row.received_bytes / 1e6:,.1f}", str(row.collectives)),
            *(f"{x:.2f}" for x in (row.moves_ms, row.cold_s, row.again_s)),
            *(f"{row.gap:.2%}", f"{row.proof_s:.1f}"),
        )
    console.print(table)
