"""`python -m tests.bench compute`: the overhead of computing on distributed tensors.

Everything runs on one rank of a pretended world of 4, whose collectives do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from rich.console import Console

from fdtensor.testing.pool import GlooPool
from tests.bench import compute_tables as tables
from tests.bench import planning
from tests.bench.compute_checks import LOOKUPS, CheckTimes, check_times
from tests.bench.compute_ops import OPS, OpTimes, op_times
from tests.bench.compute_steps import StepTimes, step_times
from tests.bench.compute_trace import MESHES, TraceTimes, trace_times
from tests.bench.models import MODELS

__all__ = ["FULL", "QUICK", "Effort", "Found", "measure", "show", "total"]


@attrs.frozen
class Effort:
    """How much a run measures."""

    rounds: int
    """How often the ways take turns."""
    calls: int
    """Calls of an op in a loop."""
    steps: int
    """Steps in a loop."""
    layers: int
    """Of the GPT that is traced."""
    compiling: bool = False
    """Whether to compile steps by inductor too."""


FULL = Effort(rounds=15, calls=50, steps=20, layers=12)
QUICK = Effort(rounds=5, calls=10, steps=3, layers=1)


@attrs.frozen
class Found:
    """What a run measured."""

    ops: tuple[OpTimes, ...]
    steps: tuple[StepTimes, ...]
    traces: tuple[TraceTimes, ...]
    checks: tuple[CheckTimes, ...]


def measure(alone: GlooPool, effort: Effort, tick: Callable[..., None] = lambda *_: None) -> Found:
    """All parts, on a pool of one rank, whose process group is replaced.

    `tick(doing, done)` is called before each measurement, and after it with done = 1.
    """

    def done(doing: str, fn: Callable[..., Any], *args: Any) -> Any:
        tick(doing, 0)
        [result] = alone.run(fn, *args, timeout=600)
        tick(doing, 1)
        return result

    alone.run(planning.pretend, 0, 4)
    ops = [done(f"op {op.name}", _op, i, effort.rounds, effort.calls) for i, op in enumerate(OPS)]
    steps = [
        done(f"step {model.name}", _steps, i, effort.rounds, effort.steps, effort.compiling)
        for i, model in enumerate(MODELS)
    ]
    traces = [done(f"trace {mesh!r}", trace_times, mesh, effort.layers) for mesh in MESHES]
    checks = [
        done(f"look at {lookup.name}", _checks, i, effort.rounds, effort.calls)
        for i, lookup in enumerate(LOOKUPS)
    ]
    steps = [row for rows in steps for row in rows]
    return Found(*map(tuple, (ops, steps, traces, checks)))


def _op(number: int, rounds: int, count: int) -> OpTimes:
    return op_times(OPS[number], rounds, count)


def _steps(number: int, rounds: int, count: int, compiling: bool) -> list[StepTimes]:
    return step_times(MODELS[number], rounds, count, compiling)


def _checks(number: int, rounds: int, count: int) -> CheckTimes:
    return check_times(LOOKUPS[number], rounds, count)


def total() -> int:
    """How many measurements a run has."""
    return len(OPS) + len(MODELS) + len(MESHES) + len(LOOKUPS)


def show(console: Console, found: Found) -> None:
    """Prints the tables."""
    console.print(tables.ops_table(found.ops))
    console.print(tables.steps_table(found.steps))
    console.print(tables.traces_table(found.traces))
    console.print(tables.checks_table(found.checks))
