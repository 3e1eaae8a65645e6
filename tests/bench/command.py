"""The command line of the bench: runs what is asked for, shows tables, writes JSON."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fdtensor.layouts.progress import busy
from fdtensor.testing.pool import GlooPool
from tests.bench import (
    by_op,
    checkpoints,
    choice,
    compute,
    control,
    draws,
    estimates,
    overlap,
    pipelines,
    planning,
    simulated,
    tables,
    training,
)
from tests.bench import overhead as overheads
from tests.bench.cases import CASES, LARGE, SMALL, Shape
from tests.bench.overhead import OVERHEADS, Overhead
from tests.bench.planning import Million, Planned
from tests.bench.traffic import Traffic, compare

__all__ = ["Effort", "Found", "main", "measure"]

JAX = sys.executable if find_spec("jax") else None
AXES = (1, 2, 3, 4, 5)
GRAPH_AXES = 4
"""With more axes torch's graph planner takes seconds for one plan."""


@attrs.frozen
class Effort:
    """How much a run measures."""

    rounds: tuple[tuple[Shape, int], ...]
    """The sizes of traffic, and how often each call is timed."""
    tries: int
    """How often each way by hand is timed to choose one."""
    sample: int
    """Pairs of placements to plan, for each number of axes and dims."""
    graph_seconds: float
    """What torch's graph planner gets for each."""
    calls: int
    """Calls in a loop of overhead."""
    axes: tuple[int, ...] = AXES


FULL = Effort(((LARGE, 25), (SMALL, 60)), tries=7, sample=40, graph_seconds=4.0, calls=100)
QUICK = Effort(((LARGE, 5), (SMALL, 15)), tries=3, sample=6, graph_seconds=0.2, calls=20)


@attrs.frozen
class Found:
    """What a run measured."""

    traffic: tuple[Traffic, ...]
    planning: tuple[Planned, ...]
    million: tuple[Million, ...]
    overhead: tuple[Overhead, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a bench. Returns the exit status: 1 where a result was wrong, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description="fdtensor beside PyTorch: redistribute on 4 gloo processes of this machine, "
        "with DTensor and calls by hand; compute with DTensor; random with torch's own draws; "
        "choice with a textbook and others; estimate with what a calibrated cost model says; "
        "overlap with the same lines in the order of the function; checkpoint with torch's own; "
        "control with a Comm whose ranks do not watch each other; pipeline with those of torch; "
        "by-op counts what runs op by op, with DTensor; simulator takes many ranks in one process; "
        "train takes a Llama, beside torch's own parallelism.",
    )
    parser.add_argument("what", choices=["redistribute", *_BENCHES], help="what to measure")
    parser.add_argument("--json", metavar="FILE", help="write all that was measured")
    parser.add_argument("--quick", action="store_true", help="less than a minute, rougher")
    parser.add_argument("--rounds", type=int, metavar="N", help="time everything N times")
    parser.add_argument("--compile", action="store_true", help="compute: compiled steps too")
    parser.add_argument("--jax", metavar="PYTHON", default=JAX, help="choice: one that has JAX")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if options.rounds is not None and options.rounds < 1:
        print("fdtensor: --rounds takes a count, 1 or more.", file=sys.stderr)
        return 2
    if options.what in _BENCHES:
        return _BENCHES[options.what](options)
    effort = QUICK if options.quick else FULL
    if options.rounds:
        rounds = tuple((size, options.rounds) for size, _ in effort.rounds)
        effort = attrs.evolve(effort, rounds=rounds)

    console = Console()
    with _ticking(console, _count(effort)) as tick, GlooPool(4) as pool, GlooPool(1) as alone:
        found = measure(pool, alone, effort, tick)
    _show(console, found, _tables)
    _write(options.json, effort, found)
    return 0 if all(row.equal for row in found.traffic) else 1


def _effort(options: argparse.Namespace, bench: Any, count: str) -> Any:
    """The effort that is asked for, of which this field says how often things are timed."""
    effort = bench.QUICK if options.quick else bench.FULL
    return attrs.evolve(effort, **{count: options.rounds or getattr(effort, count)})


def _compute(options: argparse.Namespace) -> int:
    effort = attrs.evolve(_effort(options, compute, "rounds"), compiling=options.compile)
    return _ran(options, effort, compute.total(), compute.measure, compute.show, ranks=1)


def _random(options: argparse.Namespace) -> int:
    effort = _effort(options, draws, "rounds")
    return _ran(options, effort, draws.total(), draws.measure, draws.show)


def _choice(options: argparse.Namespace) -> int:
    effort = choice.QUICK if options.quick else choice.FULL
    measure = functools.partial(choice.measure, jax=options.jax)
    return _ran(options, effort, choice.total(effort), measure, choice.show)


def _estimate(options: argparse.Namespace) -> int:
    effort = _effort(options, estimates, "calls")
    total = effort.calibrations
    return _ran(options, effort, total, estimates.measure, estimates.show, ranks=4)


def _overlap(options: argparse.Namespace) -> int:
    effort = _effort(options, overlap, "calls")
    total = len(effort.cases) + 1
    return _ran(options, effort, total, overlap.measure, overlap.show, ranks=4)


def _checkpoint(options: argparse.Namespace) -> int:
    effort = _effort(options, checkpoints, "rounds")
    total = len(effort.states)
    return _ran(options, effort, total, checkpoints.measure, checkpoints.show, ranks=4)


def _control(options: argparse.Namespace) -> int:
    effort = _effort(options, control, "rounds")
    return _ran(options, effort, len(control.STEPS) + 1, control.measure, control.show, ranks=4)


def _pipeline(options: argparse.Namespace) -> int:
    effort = _effort(options, pipelines, "calls")
    total = len(pipelines.SCHEDULES)
    return _ran(options, effort, total, pipelines.measure, pipelines.show, ranks=4)


def _train(options: argparse.Namespace) -> int:
    effort = _effort(options, training, "calls")
    return _ran(options, effort, len(effort.meshes), training.measure, training.show, ranks=4)


def _by_op(options: argparse.Namespace) -> int:
    return _ran(options, by_op.Effort(), by_op.total(), by_op.measure, by_op.show, ranks=1)


def _simulator(options: argparse.Namespace) -> int:
    effort = _effort(options, simulated, "rounds")
    return _ran(options, effort, simulated.total(effort), simulated.measure, simulated.show)


_BENCHES: dict[str, Callable[[argparse.Namespace], int]] = {
    "compute": _compute,
    "random": _random,
    "choice": _choice,
    "estimate": _estimate,
    "overlap": _overlap,
    "checkpoint": _checkpoint,
    "control": _control,
    "pipeline": _pipeline,
    "by-op": _by_op,
    "simulator": _simulator,
    "train": _train,
}
"""What is measured, but for `redistribute`."""


def _ran(
    options: argparse.Namespace,
    effort: Any,
    total: int,
    measure: Callable[..., Any],
    show: Callable[..., None],
    ranks: int = 0,
) -> int:
    """The status after `measure`, on a pool of so many ranks where it takes one, and `show`."""
    console = Console()
    with ExitStack() as stack:
        tick = stack.enter_context(_ticking(console, total))
        pools = [stack.enter_context(GlooPool(ranks))] if ranks else []
        found = measure(*pools, effort, tick)
    _show(console, found, show)
    _write(options.json, effort, found)
    return 0


@contextmanager
def _ticking(console: Console, total: int) -> Iterator[Callable[..., None]]:
    """A progress bar, as the function that moves it."""
    columns = TextColumn("{task.description:30}"), BarColumn(), MofNCompleteColumn()
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    with busy(), bar as progress:
        task = progress.add_task("starting", total=total)

        def tick(doing: str, done: int = 0) -> None:
            progress.update(task, description=doing, advance=done)

        yield tick


def _write(path: str | None, effort: Any, found: Any) -> None:
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**_machine(), "effort": attrs.asdict(effort), **attrs.asdict(found)}, file)
            file.write("\n")


def measure(
    pool: GlooPool, alone: GlooPool, effort: Effort, tick: Callable[..., None] = lambda *_: None
) -> Found:
    """All three parts: `pool` has 4 ranks, `alone` has one, whose process group is replaced.

    `tick(doing, done)` is called before each measurement, and after it with done = 1.
    """

    def done(doing: str, run: Callable[..., Any], *args: Any) -> Any:
        tick(doing, 0)
        result = run(*args)
        tick(doing, 1)
        return result

    def on_one(fn: Callable[..., Any], *args: Any) -> Any:
        return alone.run(fn, *args, timeout=300)[0]

    pool.run(_quiet)
    traffic = [
        done(f"traffic {case.name}", compare, pool, case, size, rounds, effort.tries)
        for size, rounds in effort.rounds
        for case in CASES
    ]
    on_one(_quiet)
    on_one(planning.pretend, 1, 32)
    planned = []
    for axes in effort.axes:
        for dims in planning.SHAPES:
            seconds = effort.graph_seconds if axes <= GRAPH_AXES else 0.0
            args = (axes, dims, effort.sample, seconds)
            planned.append(done(f"planning {axes} axes", on_one, planning.planned, *args))
    million = done("planning a million ranks", on_one, planning.million)
    on_one(planning.pretend, 1, 4)
    overhead = [
        done(f"overhead {case.name}", on_one, overheads.overhead, case, nccl, effort.calls)
        for nccl in (False, True)
        for case in OVERHEADS
    ]
    return Found(tuple(traffic), tuple(planned), tuple(million), tuple(overhead))


def _count(effort: Effort) -> int:
    plans = len(effort.axes) * len(planning.SHAPES) + 1
    return len(effort.rounds) * len(CASES) + plans + 2 * len(OVERHEADS)


def _quiet() -> None:
    """Without what DTensor logs about its own plans."""
    for module in ("_redistribute", "_collective_utils"):
        logging.getLogger(f"torch.distributed.tensor.{module}").setLevel(logging.ERROR)


def _tables(console: Console, found: Found) -> None:
    console.print(tables.traffic_table(found.traffic))
    console.print(tables.planning_table(found.planning))
    console.print(tables.million_table(found.million))
    console.print(tables.overhead_table(found.overhead))


def _show(console: Console, found: Any, show: Callable[[Console, Any], None]) -> None:
    if not console.is_terminal:
        console = Console(width=200)
    show(console, found)
    machine = _machine()
    versions = ", ".join(f"{name} {text}" for name, text in machine["versions"].items())
    console.print(f"{versions}; {machine['cpus']} CPUs, {machine['platform']}")


def _machine() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for name in ("fdtensor", "torch", "attrs", "optree", "numpy"):
        with suppress(PackageNotFoundError):  # fdtensor may run from where it lies
            versions[name] = version(name)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"versions": versions, "cpus": cpus, "platform": platform.platform()}
