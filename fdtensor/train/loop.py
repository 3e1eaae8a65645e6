"""The losses of a job that runs: on a mesh, or in plain torch on this process alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fdtensor.ops.random_bits import fold_in, key
from fdtensor.parallel.pipelines.planned import Planned
from fdtensor.programs.program import Program
from fdtensor.runtime.comm import Comm
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.spmd import spmd
from fdtensor.train.job import Job
from fdtensor.train.layouts import tokens_layout
from fdtensor.train.pipelined import Pipelined, pipelined
from fdtensor.train.saves import Saves

__all__ = ["losses", "plain_losses", "steps"]


def plain_losses(job: Job) -> Iterator[float]:
    """The loss before each step, on this process alone, in torch without fdtensor.

    What is dropped, torch's own generator says.
    """
    step = job.step()
    params, state = job.start_alone()
    for i, tokens in enumerate(job.text()):
        params, state, loss = step(params, state, tokens, job.numbers.rate(i))
        yield loss.item()


def losses(job: Job, comm: Comm[Any], **how: Any) -> Iterator[float]:
    """The loss before each step, on the mesh of `comm`; every rank gets all of them.

    `how` it goes is said as to `steps`.
    """
    return (loss for _, loss in steps(job, comm, **how))


def steps(
    job: Job,
    comm: Comm[Any],
    *,
    regather: bool = False,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    show: Callable[[Program | Planned], None] | None = None,
    saves: Saves | None = None,
    end: Callable[[Any], None] | None = None,
) -> Iterator[tuple[int, float]]:
    """Each step and the loss before it, on the mesh of `comm`; every rank gets all of them.

    With `regather`, gathered parameters are freed after use and gathered again in the backward.
    `microbatches` and `schedule` are those of a pipeline, where the mesh has an axis "pp".
    `show` is called with the program of a step before it runs, `end` with the parameters after the
    last. With `saves` the first step is the one after the last that was saved.
    """
    step: Pipelined | _Whole = (
        pipelined(job, comm, microbatches=microbatches, schedule=schedule, regather=regather)
        if "pp" in comm.mesh.axes
        else _Whole(job, comm, regather)
    )
    first, (params, state) = 0, job.start(comm)
    if saves is not None:
        first, (params, state) = saves.last((params, state), job.about, comm)
    for i, tokens in enumerate(job.text()):
        if i < first:
            continue
        given = step.given(tokens, i)
        if show is not None:  # by one rank alone: it must not wait for others
            show(step.trace(params, state, given))
            show = None
        params, state, loss = step(params, state, given)
        yield i, loss
        if saves is not None:
            saves.after(i + 1, (params, state), job.about, comm)
    if saves is not None:
        saves.end(comm)
    if end is not None:
        end(params)


class _Whole:
    """Steps of a job, each as one program on the mesh, the optimizer in it."""

    def __init__(self, job: Job, comm: Comm[Any], regather: bool) -> None:
        self.job, self.comm = job, comm
        self.step = spmd(job.step(comm.mesh), regather=regather, donate=("params", "state"))

    def given(self, tokens: torch.Tensor, i: int) -> Any:
        mesh, device = self.comm.mesh, self.comm.device or "cpu"
        number = torch.tensor(self.job.numbers.rate(i), dtype=torch.float64, device=device)
        args = (
            distribute(tokens.to(device), tokens_layout(mesh), self.comm),
            distribute(number, mesh.layout(), self.comm),
        )
        return args, {"key": fold_in(key(self.job.seed), i)} if self.job.model.dropout else {}

    def trace(self, params: Any, state: Any, given: Any) -> Program:
        args, keys = given
        return self.step.trace(params, state, *args, **keys)

    def __call__(self, params: Any, state: Any, given: Any) -> tuple[Any, Any, float]:
        args, keys = given
        params, state, loss = self.step(params, state, *args, **keys)
        return params, state, loss.full().item()
