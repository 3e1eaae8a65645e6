"""`python -m tests.bench choice`: the programs chosen for large functions, and the time it takes.

Nothing is computed: functions are traced on types of their real sizes, each in a process of its own
that has traced nothing before. Seconds are those of the processor, so that a busy machine does not
count. The gap is what the choice takes more than the best of all combinations of rows, at most.
Beside the bytes of a program stand those of a textbook, of PyTorch and of JAX.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory

import attrs
from rich.console import Console
from rich.table import Table

from fdtensor.programs.bound.least import bound_of
from fdtensor.programs.timeline import timeline
from fdtensor.programs.tracer import trace
from tests.bench.choice_cases import CASES, LAYERED, case_of
from tests.bench.choice_others import Others, others

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
    in_halves_bytes: int
    """The same where pending sums of halves are reduced as halves, not in float32."""
    collectives: int
    moves_ms: float
    """What its collectives take by the cost model."""
    exposed: float
    """The part of it during which nothing is computed, by the timeline of the program."""
    cold_s: float
    """In a process that has traced nothing."""
    again_s: float
    """Traced anew in the same process, with the choice made anew."""
    gap: float
    """The part that the choice takes more than the best one, at most, by its prices."""
    proof_s: float
    """How long it takes to prove that."""
    kept_s: float = 0.0
    """In a process that has traced nothing, with the choice kept on disk by another one."""
    others: Others | None = None
    """What others receive."""


@attrs.frozen
class Found:
    """What a run measured."""

    programs: tuple[Chosen, ...]


def total(effort: Effort) -> int:
    """The number of measurements."""
    return len(effort.cases)


def measure(
    effort: Effort, tick: Callable[..., None] = lambda *_: None, jax: str | None = None
) -> Found:
    """All cases; `tick(doing, done)` is called before each, and after it with done = 1.

    `jax` is the Python that has JAX.
    """
    rows: list[Chosen] = []
    spawn = multiprocessing.get_context("spawn")
    for name, number in effort.cases:
        tick(name, 0)
        with TemporaryDirectory() as folder:
            with spawn.Pool(1) as pool:
                row = pool.apply(chosen, (name, number, folder))
                beside = pool.apply(others, (name, number, jax))
            with spawn.Pool(1) as pool:
                kept = pool.apply(traced_again, (name, number, folder))
        rows.append(attrs.evolve(row, others=beside, kept_s=kept))
        tick(name, 1)
    return Found(tuple(rows))


def traced_again(name: str, number: int, folder: str) -> float:
    """The seconds of a trace in a fresh process, with what another one kept in a folder."""
    os.environ["FDTENSOR_CACHE"] = folder
    case, mesh = case_of(name, number)
    start = time.process_time()
    trace(case.f, *case.types(mesh))
    return time.process_time() - start


def chosen(name: str, number: int, folder: str) -> Chosen:
    """The program of a case on one of its meshes, whose choice is kept in a folder."""
    os.environ["FDTENSOR_CACHE"] = folder
    case, mesh = case_of(name, number)
    start = time.process_time()
    program = trace(case.f, *case.types(mesh))
    cold = time.process_time() - start
    os.environ["FDTENSOR_CACHE"] = "off"
    trace(case.f, *case.types(mesh))
    again = time.process_time() - start - cold
    count, spent = len(program.collectives), program.seconds * 1e3
    start = time.process_time()
    gap = bound_of(program.origin.choices).gap
    proof = time.process_time() - start
    in_halves = trace(case.f, *case.types(mesh), reduce_dtype=None).received_bytes
    times = timeline(program, program.cost)
    exposed = times.exposed / times.sending if times.sending else 0.0
    axes = ", ".join(f"{a}={n}" for a, n in zip(mesh.axes, mesh.sizes, strict=True))
    received = program.received_bytes, in_halves
    return Chosen(name, axes, *received, count, spent, exposed, cold, again, gap, proof)


def show(console: Console, found: Found) -> None:
    """Tables of the programs, and of what others receive."""
    table = Table(
        title="chosen for every rank; CPU seconds to trace, in a fresh process, in one that finds "
        "the choice kept, and again"
    )
    times = ("cold s", "kept s", "again s")
    columns = ("received MB", "collectives", "moves ms", "exposed", *times, "gap")
    for column in ("case", "mesh"):
        table.add_column(column)
    for column in (*columns, "proof s"):
        table.add_column(column, justify="right")
    for row in found.programs:
        table.add_row(
            *(row.case, row.mesh, f"{row.received_bytes / 1e6:,.1f}", str(row.collectives)),
            *(f"{row.moves_ms:.2f}", f"{row.exposed:.0%}"),
            *(f"{row.cold_s:.2f}", f"{row.kept_s:.2f}", f"{row.again_s:.2f}"),
            *(f"{row.gap:.2%}", f"{row.proof_s:.1f}"),
        )
    console.print(table)
    beside = Table(
        title="MB that a rank receives: chosen, by a textbook, with PyTorch and with JAX"
    )
    for column in ("case", "mesh"):
        beside.add_column(column)
    for column in ("chosen", "sums in halves", "textbook", "PyTorch", "JAX"):
        beside.add_column(column, justify="right")
    why: list[str] = []
    for row in found.programs:
        given = attrs.astuple(row.others) if row.others else ()
        texts = [_megabytes(x, why) for x in (row.received_bytes, row.in_halves_bytes, *given)]
        beside.add_row(row.case, row.mesh, *texts)
    console.print(beside, *why, sep="\n")


def _megabytes(received: int | str, why: list[str]) -> str:
    """The bytes, or a dash and a reason among those below the table."""
    if not isinstance(received, str):
        return f"{received / 1e6:,.1f}"
    if received not in why:
        why.append(received)
    return "-"
