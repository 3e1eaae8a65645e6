"""`python -m tests.bench pipeline`: pipelines beside those of torch, on 4 gloo processes.

A step of the same layers, forward and backward, in turns; what torch's stages learn about shapes is
learned before. Beside it the part of the time that ranks wait: by the schedule in units, and as it
was on the first rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import attrs
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed import pipelining as torchs

import fdtensor as fd
from fdtensor.layouts.mesh import Mesh
from fdtensor.plans.cost import GLOO
from fdtensor.testing.pool import GlooPool

__all__ = ["FULL", "QUICK", "SCHEDULES", "Effort", "Found", "Steps", "measure", "show"]

SCHEDULES = {
    "gpipe": torchs.ScheduleGPipe,
    "1f1b": torchs.Schedule1F1B,
    "interleaved": torchs.ScheduleInterleaved1F1B,
    "zero_bubble": torchs.ScheduleInterleavedZeroBubble,
}
"""Schedules of both, by name."""

ROUND = ("interleaved",)
"""Those with two stages a rank."""

PARTS = 8


@attrs.frozen
class Effort:
    """How much a run measures."""

    width: int
    rows: int
    """Of the whole batch."""
    calls: int
    """How often each step is timed."""


FULL = Effort(512, 2048, 15)
QUICK = Effort(256, 512, 5)


@attrs.frozen
class Steps:
    """A step of one schedule, in milliseconds, and the parts of the time that ranks wait."""

    schedule: str
    own: float
    torchs: float
    bubble: float
    waited: float
    difference: float
    """Between the losses of both."""


@attrs.frozen
class Found:
    """What a run measured."""

    steps: tuple[Steps, ...]


def measure(pool: GlooPool, effort: Effort, tick: Callable[..., None] = lambda *_: None) -> Found:
    """The steps of all schedules: `pool` has 4 ranks."""
    steps: list[Steps] = []
    for name in SCHEDULES:
        tick(name, 0)
        steps.append(pool.run(_timed, name, effort, timeout=600)[0])
        tick(name, 1)
    return Found(tuple(steps))


def _layers(width: int) -> torch.nn.Module:
    shapes = (width, 4 * width), (4 * width, width)
    up, down = (torch.nn.Linear(*shape) for shape in shapes)
    return torch.nn.Sequential(up, torch.nn.GELU(), down)


def _timed(name: str, effort: Effort) -> Steps:
    """Steps of both on this rank, in turns."""
    torch.set_num_threads(1)
    count = 8 if name in ROUND else 4
    torch.manual_seed(0)
    modules = [_layers(effort.width) for _ in range(count)]
    x, y = (torch.randn(effort.rows, effort.width) for _ in "xy")
    own, waited = _own(name, modules, x, y)
    other = _torchs(name, modules, x, y)
    spent: dict[Any, list[float]] = {own: [], other: []}
    losses, shares = {}, []
    for turn in range(effort.calls + 2):
        for one in spent:
            dist.barrier()
            start = time.perf_counter()
            losses[one] = one()
            dist.barrier()
            took = time.perf_counter() - start
            if turn > 1:
                spent[one].append(1e3 * took)
                if one is own:
                    shares.append(waited() / took)
    bubble = fd.parallel.pipeline(
        [lambda p, x: x] * count, _loss, meshes=_meshes(count), microbatches=PARTS, schedule=name
    ).schedule.bubble
    known = [torch.tensor(losses[one]) for one in (own, other)]
    for loss in known:
        dist.broadcast(loss, 3)
    medians = [median(times) for times in spent.values()]
    return Steps(name, *medians, bubble, median(shares), (known[0] - known[1]).abs().item())


def _loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(y, target)


def _meshes(count: int) -> list[Mesh]:
    return [Mesh.from_ranks([i % 4], "dp") for i in range(count)]


def _own(name: str, modules: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, Any]:
    """A step of ours, and the seconds that the last one waited."""
    comm, meshes = fd.connect(Mesh(all=4), cost=GLOO), _meshes(len(modules))

    def stage(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(modules[0], params, (x,))

    params = [
        {k: fd.distribute(v.detach(), mesh.layout(), comm) for k, v in m.named_parameters()}
        for m, mesh in zip(modules, meshes, strict=True)
    ]
    ends = zip((x, y), (meshes[0], meshes[-1]), strict=True)
    data = [fd.distribute(t, mesh.layout(), comm) for t, mesh in ends]
    step = fd.parallel.pipeline(
        [stage] * len(modules), _loss, meshes=meshes, microbatches=PARTS, schedule=name
    )

    def run() -> float:
        _, value = step(params, *data)
        return value.local.item()

    return run, lambda: step.waited


def _torchs(name: str, modules: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """A step of torch."""
    rank, count = dist.get_rank(), len(modules)
    own = [i for i in range(count) if i % 4 == rank]
    stages = [torchs.PipelineStage(modules[i], i, count, torch.device("cpu")) for i in own]
    several = name in ROUND or name == "zero_bubble"
    schedule: Any = SCHEDULES[name](stages if several else stages[0], PARTS, loss_fn=_loss)

    def run() -> float:
        for i in own:
            modules[i].zero_grad()
        losses: list[torch.Tensor] = []
        last = count - 1 in own
        schedule.step(*((x,) if rank == 0 else ()), target=y if last else None, losses=losses)
        return torch.stack(losses).mean().item() if losses else 0.0

    return run


def show(console: Console, found: Found) -> None:
    """A table with a row for each schedule."""
    table = Table(title="4 gloo processes, 8 parts: ms of a step, medians")
    for column in ("schedule", "fdtensor", "torch", "ratio", "waiting by units", "waited"):
        table.add_column(column, justify="right" if column != "schedule" else "left")
    for row in found.steps:
        times = f"{row.own:.1f}", f"{row.torchs:.1f}", f"{row.own / row.torchs:.2f}"
        table.add_row(row.schedule, *times, f"{row.bubble:.0%}", f"{row.waited:.0%}")
    console.print(table)
