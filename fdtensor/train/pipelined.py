"""`Pipelined`: steps of a job whose layers lie on meshes of their own, one for each rank of "pp".

A parameter that several parts read, as a tied embedding, lives with the first of them: the others
get it anew in each step, and their gradients go there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import attrs
import torch

from fdtensor import optim
from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.parallel.pipelines.pipeline import Pipeline, pipeline
from fdtensor.parallel.pipelines.planned import Planned
from fdtensor.runtime.comm import Comm
from fdtensor.tensors.connect import redistribute
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.train.job import Job, pin
from fdtensor.train.layouts import part_meshes, tokens_layout
from fdtensor.train.step import computing, mean_loss

__all__ = ["Pipelined", "parts_of_batch", "pipelined"]


@attrs.frozen(eq=False)
class Pipelined:
    """Steps of a job on the meshes of its parts."""

    job: Job
    comm: Comm[Any]
    pipeline: Pipeline
    layouts: Sequence[dict[str, Layout]]
    """Those of the parameters that each part reads, on its mesh."""

    def given(self, tokens: torch.Tensor, i: int) -> Any:
        """What step `i` takes: what the first part reads, what the last one is to say, the rate."""
        first, last = self.pipeline.meshes[0], self.pipeline.meshes[-1]
        tokens = tokens.to(self.comm.device or "cpu")
        x = distribute(tokens[:, :-1].contiguous(), tokens_layout(first), self.comm)
        target = distribute(tokens[:, 1:].contiguous(), tokens_layout(last), self.comm)
        return x, target, self.job.numbers.rate(i)

    def trace(self, params: Any, _state: Any, given: Any) -> Planned:
        """The programs and the schedule of a step; the optimizer is not in them."""
        x, target, _ = given
        own = [
            {name: params[name].type.with_layout(layout) for name, layout in layouts.items()}
            for layouts in self.layouts
        ]
        return self.pipeline.trace(own, x, target, cost=self.comm.cost)

    def __call__(self, params: Any, state: Any, given: Any) -> tuple[Any, Any, float]:
        """The parameters and the state after a step, and the loss before it."""
        x, target, rate = given
        each, loss = self.pipeline(self._own(params), x, target)
        grads: dict[str, DTensor] = {}
        for name, gradient in (item for part in each for item in part.items()):
            home = params[name].layout
            if name in grads:
                grads[name] = grads[name] + redistribute(gradient, home)
            else:
                grads[name] = gradient
        numbers = self.job.numbers
        clipped, _ = optim.clip_grad_norm(grads, numbers.clip)
        params, state = numbers.optimizer(params).step(params, clipped, state, lr=rate)
        return params, state, redistribute(loss, self.comm.mesh.layout()).item()

    def _own(self, params: dict[str, DTensor]) -> list[dict[str, DTensor]]:
        """The parameters of each part, on its mesh."""
        return [
            {
                name: params[name]
                if params[name].layout is layout
                else redistribute(params[name], layout)
                for name, layout in layouts.items()
            }
            for layouts in self.layouts
        ]


def pipelined(
    job: Job,
    comm: Comm[Any],
    *,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    regather: bool = False,
) -> Pipelined:
    """The steps of a job on a mesh with an axis "pp".

    A batch goes through in `microbatches` parts; None for as many as the rows of a rank can be cut
    into, up to four for each rank of "pp". Raises `FdtensorError` where the rows do not divide, for
    a model with dropout, and for one that has fewer layers than "pp" has ranks.
    """
    meshes = part_meshes(comm.mesh)
    microbatches = parts_of_batch(job, comm.mesh, microbatches)
    parts = job.model.parts([pin(mesh) for mesh in meshes])
    step = pipeline(
        [computing(part.run, job.precision) for part in parts],
        mean_loss,
        meshes=meshes,
        microbatches=microbatches,
        schedule=schedule,
        regather=regather,
    )
    return Pipelined(job, comm, step, job.part_layouts(comm.mesh))


def parts_of_batch(job: Job, mesh: Mesh, asked: int | None) -> int:
    """Into how many parts the batch of a job goes through the pipeline of a mesh.

    Raises `FdtensorError` for what cannot go through, as `pipelined` does.
    """
    if job.model.dropout:
        raise FdtensorError(
            "a pipeline has no key from which dropout could be drawn.",
            dropout=job.model.dropout,
            hint="Train without dropout, or without an axis pp.",
        )
    meshes = part_meshes(mesh)
    ranks = prod(meshes[0].axis_size(axis) for axis in tokens_layout(meshes[0]).cuts(0))
    rows, rest = divmod(job.batch, ranks)
    if rest:
        raise FdtensorError(
            f"a batch of {job.batch} cannot be shared by {ranks} ranks.",
            mesh=mesh,
            hint=f"Give a batch that is a multiple of {ranks}.",
        )
    if asked is None:
        return max(n for n in range(1, 4 * len(meshes) + 1) if rows % n == 0)
    if asked < 1 or rows % asked:
        raise FdtensorError(
            f"a batch of {job.batch} cannot be cut into {asked} equal parts on each of {ranks} "
            "ranks.",
            hint=f"Give a batch that is a multiple of {ranks * max(1, asked)}.",
        )
    return asked
