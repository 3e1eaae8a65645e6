"""`python -m tests.bench estimate`: the seconds that a calibrated cost model says, and those taken.

4 gloo processes calibrate, then run each step, in turns; ranks start together, run it as a loop of
training does, and the last of them counts. A step updates its parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import attrs
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import fdtensor as fd
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.cost import CostModel
from fdtensor.programs.program import Program
from fdtensor.programs.timeline import timeline
from fdtensor.programs.tracer import trace
from fdtensor.testing.pool import GlooPool

__all__ = ["CASES", "FULL", "QUICK", "Effort", "Estimated", "Found", "Once", "measure", "show"]

MESH = Mesh(x=4)

SPELL = 0.2
"""The seconds, about, for which a step is run again and again each time."""


@attrs.frozen
class Effort:
    """How much a run measures."""

    calibrations: int
    """How often the cost model is measured anew."""
    calls: int
    """How often each step is timed after each."""
    scale: int
    """By how much tensors are smaller than they are in full."""


FULL = Effort(calibrations=5, calls=9, scale=1)
QUICK = Effort(calibrations=1, calls=3, scale=1)


@attrs.frozen
class Once:
    """A step after one calibration, in milliseconds."""

    measured: float
    estimated: float
    computing: float
    """The part of the estimate that is computed, as if nothing was sent."""
    sending: float


@attrs.frozen
class Estimated:
    """A step after each calibration."""

    case: str
    times: tuple[Once, ...]

    @property
    def ratio(self) -> float:
        """The estimate as a part of what was measured: the median of all calibrations."""
        return median(once.estimated / once.measured for once in self.times)


@attrs.frozen
class Found:
    """What a run measured."""

    steps: tuple[Estimated, ...]


def _step(params: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parameters of an MLP after a step of gradient descent."""

    def loss(p: dict[str, torch.Tensor]) -> torch.Tensor:
        return (torch.relu(x @ p["up"]) @ p["down"]).square().mean()

    grads = torch.func.grad(loss)(params)
    return {name: p - 0.1 * grads[name] for name, p in params.items()}


def _mlp(sizes: Sequence[int], up: int | None, down: int | None, x: int | None) -> tuple[Any, ...]:
    """The types of a step of this batch and width, with the dim of each that is cut."""
    batch, wide, narrow = sizes

    def typed(shape: tuple[int, int], dim: int | None) -> TensorType:
        layout = MESH.layout(*["x" if d == dim else None for d in range(2)])
        return TensorType(shape, torch.float32, layout)

    params = {"up": typed((narrow, wide), up), "down": typed((wide, narrow), down)}
    return params, typed((batch, narrow), x)


def _data_parallel(scale: int) -> Program:
    return _traced(_mlp((4096 // scale, 1024 // scale, 512 // scale), None, None, 0))


def _fsdp(scale: int) -> Program:
    return _traced(_mlp((4096 // scale, 1024 // scale, 512 // scale), 0, 0, 0))


def _tensor_parallel(scale: int) -> Program:
    return _traced(_mlp((2048 // scale, 2048 // scale, 512 // scale), 1, 0, None))


def _traced(types: tuple[Any, ...]) -> Program:
    out = {name: type.layout for name, type in types[0].items()}
    return trace(_step, *types, out_layouts=out)


def _moved(scale: int) -> Program:
    src = TensorType((4096 // scale, 4096 // scale), torch.float32, MESH.layout("x"))
    return trace(lambda x: x.clone(), src, out_layouts=MESH.layout(None, "x"))


CASES: dict[str, Callable[[int], Program]] = {
    "MLP step, data parallel": _data_parallel,
    "MLP step, FSDP": _fsdp,
    "MLP step, tensor parallel": _tensor_parallel,
    "64 MB from rows to columns": _moved,
}
"""The program of each step, made by the default model."""


def measure(pool: GlooPool, effort: Effort, tick: Callable[..., None] = lambda *_: None) -> Found:
    """All cases on a pool of 4 ranks; `tick(doing, done)` as for the other benches."""
    times: dict[str, list[Once]] = {name: [] for name in CASES}
    for _ in range(effort.calibrations):
        tick("calibrate", 0)
        for name, once in zip(CASES, pool.run(_round, effort, timeout=300)[0], strict=True):
            times[name].append(once)
        tick("calibrate", 1)
    return Found(tuple(Estimated(name, tuple(each)) for name, each in times.items()))


def _round(effort: Effort) -> list[Once]:
    """A calibration and each step, on one rank."""
    comm = fd.connect(MESH)
    cost = fd.calibrate(comm)
    return [_once(make(effort.scale), cost, comm, effort.calls) for make in CASES.values()]


def _once(program: Program, cost: CostModel, comm: Any, calls: int) -> Once:
    values = [torch.randn(t.local_shape(comm.rank)) for t in program.in_types]
    said = timeline(program, cost)
    count = max(1, round(SPELL / said.seconds))
    fd.run(program, values, comm)
    spent: list[float] = []
    for _ in range(calls):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            fd.run(program, values, comm)
        dist.barrier()
        spent.append((time.perf_counter() - start) / count)
    return Once(*(1e3 * s for s in (median(spent), said.seconds, said.computing, said.sending)))


def show(console: Console, found: Found) -> None:
    """A table of the steps."""
    table = Table(title="4 gloo processes: ms, medians; the ratios are medians of calibrations")
    table.add_column("step")
    for column in ("measured", "estimated", "estimated/measured", "computing", "sending", "range"):
        table.add_column(column, justify="right")
    for row in found.steps:
        names = ("measured", "estimated", "computing", "sending")
        each = {name: median(getattr(once, name) for once in row.times) for name in names}
        ratios: Sequence[float] = sorted(once.estimated / once.measured for once in row.times)
        table.add_row(
            *(row.case, f"{each['measured']:.1f}", f"{each['estimated']:.1f}", f"{row.ratio:.2f}"),
            *(f"{each['computing']:.1f}", f"{each['sending']:.1f}"),
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
        )
    console.print(table)
