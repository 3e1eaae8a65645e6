"""`calibrate` measures a cost model where it runs; `estimate` prices a plan or program by one."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from fdtensor.layouts.errors import CommError, PlanError
from fdtensor.layouts.expected import whole_number
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Placement, Replicate, Shard
from fdtensor.layouts.progress import working
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    ReduceScatter,
    Step,
    by_exchange,
)
from fdtensor.plans.cost import LOCAL, CostModel, seconds
from fdtensor.plans.fused import Fused
from fdtensor.plans.planner import Plan
from fdtensor.plans.traffic import most_received
from fdtensor.programs.program import Program
from fdtensor.programs.timeline import timeline
from fdtensor.runtime.comm import refuse_no_comm
from fdtensor.runtime.interpreter import run

__all__ = ["calibrate", "estimate"]

SMALL, COPIED, LARGE = 1 << 10, 1 << 21, 1 << 23
"""Elements of the float32 tensors that are timed: 4 KB and 32 MB are moved, 8 MB copied."""

WINDOW, MOST_CALLS = 0.04, 10_000
"""The seconds for which all ranks compute, about, long beside the turns of processes that share a
core; and the most calls in it."""

MEASURED = {"": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}
"""The dtypes whose products are timed; float32 stands for all others."""

aten = torch.ops.aten


@named_arguments
def estimate(x: Plan | Fused | Program, cost: CostModel) -> float:
    """The seconds that a plan takes by `cost`, which need not be the one it was made for.

    Of a program it is how long its `timeline` is: lines compute while collectives are under way.
    Communication alone is `program.seconds` by its own model, and by any other the `sending` of
    `timeline`. Raises `PlanError` for anything else.

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((1000,), torch.float32, mesh.layout("x"))
    >>> p = plan(x, mesh.layout())
    >>> fd.cost.estimate(p, fd.cost.GLOO) > fd.cost.estimate(p, fd.cost.NCCL)
    True
    >>> program = trace(lambda x: x.sum(), x)
    >>> fd.cost.estimate(program, fd.cost.NCCL) > program.seconds  # it adds up, too
    True
    """
    if not isinstance(x, (Plan, Fused, Program)) or not isinstance(cost, CostModel):
        raise PlanError(
            "estimate prices a plan or a program by a cost model.",
            given=type(x).__name__,
            cost=repr(cost),
            hint="Write estimate(plan(src, dst), NCCL), or with the model of calibrate(comm).",
        )
    if isinstance(x, Program):
        return timeline(x, cost).seconds
    plans = x.plans if isinstance(x, Fused) else (x,)
    return sum(seconds(step, cost) for part in plans for step in part.steps)


@named_arguments
def calibrate(comm: Any, *, rounds: int = 3) -> CostModel:
    """A cost model of the processes and links of `comm`, by timing what they do.

    Collective over the mesh; takes seconds, and every rank gets the same model. Latency
    and bandwidth come from messages along each axis, other kinds of collectives are relative to
    messages along the first axis. Copies, products of matrices by dtype and calls of small ops are
    timed while all ranks make them, with the threads that they have, as they share the machine.
    The slowest rank counts, and no link as faster than memory; of few `rounds` the figures are
    rough. Raises `CommError` on a simulated Comm and on a mesh of one rank.

    >>> with local_cluster(2) as cluster:
    ...     ours, theirs = cluster.run(lambda: fd.cost.calibrate(connect(Mesh(x=2)), rounds=1))

    >>> ours == theirs, ours.latency > 0
    (True, True)
    """
    refuse_no_comm(comm)
    rounds = whole_number("rounds", rounds, "number of rounds", "Write 1 or more.")
    mesh = comm.mesh
    axes = [axis for axis in mesh.axes if mesh.axis_size(axis) > 1]
    if comm.rank is None or not axes:
        raise CommError(
            "there are no links to measure.",
            comm=repr(comm),
            hint="Calibrate on a real mesh of two ranks or more; GLOO and NCCL are ready-made.",
        )
    with working(f"measuring {mesh!r}"):
        return _measured(comm, mesh, axes, rounds)


def _measured(comm: Any, mesh: Mesh, axes: Sequence[str], rounds: int) -> CostModel:
    block, number = (torch.ones(n, device=comm.device) for n in (COPIED, 1))
    copy = 2 * block.nbytes / _shared(comm, block.clone, rounds)
    links = {axis: _fit(comm, _message(mesh, axis), copy, rounds) for axis in axes}
    base, per_byte = links[axes[0]]
    count = mesh.axis_size(axes[0])
    latency = base / count  # a launch and a message for each of the others
    launch, slowdown = [("peer_to_peer", latency)], []
    for kind, make in _kinds(mesh, axes[0]).items():
        start, slope = _fit(comm, make, copy, rounds)
        launch.append((kind, max(0.0, start - (count - 1) * latency)))
        slowdown.append((kind, slope / per_byte))
    launch.append((LOCAL, _shared(comm, lambda: aten.mul.Tensor(number, number), rounds)))
    return CostModel(
        f"measured on {mesh!r}",
        latency,
        1 / per_byte,
        copy,
        tuple((name, _flops(comm, dtype, rounds)) for name, dtype in MEASURED.items()),
        tuple(launch),
        tuple(slowdown),
        tuple((axis, s / mesh.axis_size(axis), 1 / slope) for axis, (s, slope) in links.items()),
    )


def _flops(comm: Any, dtype: torch.dtype, rounds: int) -> float:
    """Floating-point operations per second of a product of matrices on the slowest rank."""
    square = torch.ones(512, 512, dtype=dtype, device=comm.device)
    return 2 * len(square) ** 3 / _shared(comm, lambda: aten.mm.default(square, square), rounds)


def _shared(comm: Any, call: Callable[[], object], rounds: int) -> float:
    """The seconds of a call on the slowest rank while all ranks make it again and again."""
    call()  # groups and agreement
    once = _agreed(comm, _timed(call, comm.device))
    count = max(1, min(MOST_CALLS, round(WINDOW / max(once, 1e-9))))

    def often() -> None:
        for _ in range(count):
            call()

    times: list[float] = []
    for _ in range(rounds):
        _agreed(comm, 0.0)  # ranks start together
        times.append(_timed(often, comm.device) / count)
    return _agreed(comm, median(times))


def _timed(call: Callable[[], object], device: torch.device) -> float:
    _settle(device)
    start = time.perf_counter()
    call()
    _settle(device)
    return time.perf_counter() - start


def _typed(mesh: Mesh, axis: str, numel: int, placement: Placement) -> TensorType:
    numel = -(-numel // mesh.size) * mesh.size
    placements = [placement if name == axis else Replicate() for name in mesh.axes]
    return TensorType((numel, mesh.size), torch.float32, Layout(mesh, placements))


def _message(mesh: Mesh, axis: str) -> Callable[[int], Step]:
    return lambda numel: by_exchange(
        _typed(mesh, axis, numel, Shard(0)), _typed(mesh, axis, numel, Replicate())
    )


def _kinds(mesh: Mesh, axis: str) -> dict[str, Callable[[int], Step]]:
    """For each kind of collective, a step of about so many elements along `axis`."""

    def step(collective: Collective, before: Placement, after: Placement) -> Callable[[int], Step]:
        return lambda n: Step(
            collective, _typed(mesh, axis, n, before), _typed(mesh, axis, n, after)
        )

    def packed(numel: int) -> Step:
        src, dst = _typed(mesh, axis, numel, Shard(0)), _typed(mesh, axis, numel, Shard(1))
        return by_exchange(src, dst, "all_to_all")

    axes = (axis,)
    return {
        "all_gather": step(AllGather(axes, (0,)), Shard(0), Replicate()),
        "all_to_all": step(AllToAll(axes, 0, 1), Shard(0), Shard(1)),
        "all_reduce": step(AllReduce(axes, "sum"), Partial("sum"), Replicate()),
        "reduce_scatter": step(ReduceScatter(axes, (0,), "sum"), Partial("sum"), Shard(0)),
        "exchange": packed,
    }


def _fit(comm: Any, make: Callable[[int], Step], copy: float, rounds: int) -> tuple[float, float]:
    """The seconds of a small step, and those for each byte more, but for what it copies."""
    times, sizes = [], []
    for numel in (SMALL // comm.mesh.size, LARGE // comm.mesh.size):
        step = make(numel)
        moved = most_received((step,))
        call = functools.partial(
            run,
            Plan(step.src, step.dst, (step,), comm.cost),
            torch.ones(step.src.local_shape(comm.rank), device=comm.device),
            comm,
        )
        times.append(_shared(comm, call, rounds) - step.collective.copied(step, moved) / copy)
        sizes.append(moved)
    slope = (times[1] - times[0]) / (sizes[1] - sizes[0])
    return max(times[0], 0.0), max(slope, 1 / copy)  # less is noise of what it copies


def _settle(device: torch.device) -> None:
    """Waits for what an accelerator has under way."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _agreed(comm: Any, value: float) -> float:
    """The largest of the values of all ranks."""
    mesh = comm.mesh
    src = TensorType((1,), torch.float64, Layout(mesh, [Partial("max")] * mesh.ndim))
    dst = src.cotangent()
    axes = tuple(axis for axis in mesh.axes if mesh.axis_size(axis) > 1)
    reduction = Plan(src, dst, (Step(AllReduce(axes, "max"), src, dst),), comm.cost)
    return float(
        run(reduction, torch.tensor([value], dtype=torch.float64, device=comm.device), comm)
    )
