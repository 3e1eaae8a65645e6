"""The time it takes to trace: a training step of a GPT with AdamW, no processes needed.

`record` runs the function once on fake tensors, `choose` gives every value its layout and puts in
the collectives, and `write` makes the Python code of one rank. Times are in seconds and of a
process that has traced nothing like it, but for `again`, which traces the step anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tree import flatten
from fdtensor.plans.cost import NCCL
from fdtensor.programs.recording import recorded
from fdtensor.programs.tracer import is_typed, trace, type_of
from fdtensor.runtime.funcol import FuncolComm
from fdtensor.runtime.runner import compiled
from fdtensor.train.gpt import Size
from fdtensor.train.job import Job, types

__all__ = ["MESHES", "TraceTimes", "trace_times"]

MESHES = (Mesh(tp=4), Mesh(fsdp=4), Mesh(dp=2, tp=2))
"""What the step is traced for: every rank of a world of 4, by another way of training."""


@attrs.frozen
class TraceTimes:
    """How long it takes to trace a step, and how large it is."""

    mesh: str
    layers: int
    calls: int
    """The aten calls of the function."""
    eqns: int
    """The lines of its program."""
    collectives: int
    record_s: float
    choose_s: float
    """All of a trace but recording."""
    write_s: float
    again_s: float


def trace_times(mesh: Mesh, layers: int) -> TraceTimes:
    """A step of a GPT of width 128 on a mesh whose axes are named as `fdtensor.train` wants."""
    job = Job(Size(layers=layers, width=128, heads=4, length=64))
    step = job.step(mesh)
    args = types(job, mesh)
    leaves, spec = flatten((args, {}), is_leaf=is_typed)
    given = [type_of(leaf) for leaf in leaves]

    record_s, it = _timed(lambda: recorded(step, spec, leaves, given))
    traced_s, program = _timed(lambda: trace(step, *args, cost=NCCL))
    again_s, _ = _timed(lambda: trace(step, *args, cost=NCCL))
    record_again_s, _ = _timed(lambda: recorded(step, spec, leaves, given))
    write_s, _ = _timed(lambda: compiled(program, FuncolComm(mesh, cost=NCCL)))
    return TraceTimes(
        repr(mesh),
        layers,
        len(it.graph.calls),
        len(program.eqns),
        len(program.collectives),
        record_s,
        max(0.0, traced_s - record_again_s),
        write_s,
        again_s,
    )


def _timed(make: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    made = make()
    return time.perf_counter() - start, made
