"""`Job`: what to train and how, and the losses of running it on a mesh or in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from fdtensor.comm import Comm
from fdtensor.cost import CostModel
from fdtensor.distribution import distribute
from fdtensor.errors import FdtensorError
from fdtensor.layout import Layout, TensorType
from fdtensor.mesh import Mesh
from fdtensor.pins import constrain
from fdtensor.program import Program
from fdtensor.random_bits import fold_in, key
from fdtensor.spmd import spmd
from fdtensor.tracer import trace
from fdtensor.train.gpt import Pin, Size, initial
from fdtensor.train.layouts import (
    activation_layout,
    state_layouts,
    tokens_layout,
    weight_layouts,
)
from fdtensor.train.optimizer import AdamW, fresh
from fdtensor.train.step import training
from fdtensor.train.text import batches
from fdtensor.tree import broadcast_prefix, flatten, unflatten

__all__ = ["Job", "losses", "pin", "plain_losses", "program", "types"]


@attrs.frozen
class Job:
    """A GPT, its optimizer, and the text it sees: the same on every mesh."""

    size: Size = attrs.field(factory=Size)
    numbers: AdamW = attrs.field(factory=AdamW)
    steps: int = 200
    batch: int = 16
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def __attrs_post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise FdtensorError(
                    f"a job cannot have {getattr(self, name)} as its {name}.",
                    hint="Give an int, 1 or more.",
                )

    def start(self) -> tuple[Any, Any]:
        """The parameters and the optimizer's state before the first step, as plain tensors."""
        params = {name: p.to(self.dtype) for name, p in initial(self.size, self.seed).items()}
        return params, fresh(params)

    def text(self) -> Iterator[torch.Tensor]:
        """The tokens of each step."""
        return batches(self.seed, self.steps, self.batch, self.size.length)


def plain_losses(job: Job) -> Iterator[float]:
    """The loss before each step, on this process alone, in torch without fdtensor.

    What is dropped, torch's own generator says.
    """
    step = training(job.size, job.numbers)
    params, state = job.start()
    for tokens in job.text():
        params, state, loss = step(params, state, tokens)
        yield loss.item()


def losses(
    job: Job,
    comm: Comm[Any],
    device: str = "cpu",
    *,
    regather: bool = False,
    show: Callable[[Program], None] | None = None,
) -> Iterator[float]:
    """The loss before each step, on the mesh of `comm`; every rank gets all of them.

    With `regather`, gathered parameters are freed after use and gathered again in the backward.
    `show` is called with the program of a step before it runs.
    """
    mesh = comm.mesh
    step = spmd(training(job.size, job.numbers, pin(mesh)), regather=regather)
    start = job.start()
    params, state = _placed(start, _layouts(mesh, start), comm, device)
    for i, tokens in enumerate(job.text()):
        here = distribute(tokens.to(device), tokens_layout(mesh), comm)
        keys: dict[str, Any] = {"key": fold_in(key(job.seed), i)} if job.size.dropout else {}
        if show is not None:
            show(step.trace(params, state, here, **keys))
            show = None
        params, state, loss = step(params, state, here, **keys)
        yield loss.full().item()


def program(
    job: Job, mesh: Mesh, *, cost: CostModel | None = None, regather: bool = False
) -> Program:
    """The program of one step: what every rank computes and sends. No processes needed."""
    step = training(job.size, job.numbers, pin(mesh))
    keys: dict[str, Any] = {"key": key(job.seed)} if job.size.dropout else {}
    return trace(step, *types(job, mesh), cost=cost, regather=regather, **keys)


def types(job: Job, mesh: Mesh) -> tuple[Any, Any, TensorType]:
    """The types of the parameters, of the optimizer's state and of the tokens."""
    start = job.start()
    leaves, spec = flatten(start)
    layouts = broadcast_prefix(_layouts(mesh, start), start, _is_layout)
    params, state = unflatten(
        spec, [TensorType(x.shape, x.dtype, layout) for x, layout in zip(leaves, layouts)]
    )
    shape = (job.batch, job.size.length + 1)
    return params, state, TensorType(shape, torch.int64, tokens_layout(mesh))


def pin(mesh: Mesh) -> Pin:
    """What the model calls on its activations, to pin their layouts."""
    return lambda x, name: constrain(x, activation_layout(mesh, name))


def _layouts(mesh: Mesh, start: tuple[Any, Any]) -> tuple[Any, Any]:
    weights = weight_layouts(mesh, {name: tuple(p.shape) for name, p in start[0].items()})
    return weights, state_layouts(weights)


def _placed(tree: Any, layouts: Any, comm: Comm[Any], device: str) -> Any:
    """A pytree of plain tensors, distributed."""
    leaves, spec = flatten(tree)
    wanted = broadcast_prefix(layouts, tree, _is_layout)
    placed = [distribute(x.to(device), to, comm) for x, to in zip(leaves, wanted)]
    return unflatten(spec, placed)


def _is_layout(node: object) -> bool:
    return isinstance(node, Layout)
