"""`Job`: what to train and how, and the losses of running it on a mesh or in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.pins import constrain
from fdtensor.ops.random_bits import fold_in, key
from fdtensor.plans.cost import CostModel
from fdtensor.programs.program import Program
from fdtensor.programs.tracer import trace
from fdtensor.runtime.comm import Comm
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.spmd import spmd
from fdtensor.train.gpt import Pin, Size, initial
from fdtensor.train.layouts import activation_layout, tokens_layout, weight_layouts
from fdtensor.train.optimizer import AdamW
from fdtensor.train.saves import Saves
from fdtensor.train.step import training
from fdtensor.train.text import batches

__all__ = ["Job", "losses", "pin", "plain_losses", "program", "steps", "types"]


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
        return params, self.numbers.optimizer(params).init(params)

    @property
    def about(self) -> str:
        """What makes two jobs go the same way, whatever their meshes and numbers of steps."""
        return repr(attrs.evolve(self, steps=1))

    def text(self) -> Iterator[torch.Tensor]:
        """The tokens of each step."""
        return batches(self.seed, self.steps, self.batch, self.size.length)


def plain_losses(job: Job) -> Iterator[float]:
    """The loss before each step, on this process alone, in torch without fdtensor.

    What is dropped, torch's own generator says.
    """
    step = training(job.size, job.numbers)
    params, state = job.start()
    for i, tokens in enumerate(job.text()):
        params, state, loss = step(params, state, tokens, job.numbers.rate(i))
        yield loss.item()


def losses(job: Job, comm: Comm[Any], *, regather: bool = False) -> Iterator[float]:
    """The loss before each step, on the mesh of `comm`; every rank gets all of them."""
    return (loss for _, loss in steps(job, comm, regather=regather))


def steps(
    job: Job,
    comm: Comm[Any],
    device: str = "cpu",
    *,
    regather: bool = False,
    show: Callable[[Program], None] | None = None,
    saves: Saves | None = None,
) -> Iterator[tuple[int, float]]:
    """Each step and the loss before it, on the mesh of `comm`; every rank gets all of them.

    With `regather`, gathered parameters are freed after use and gathered again in the backward.
    `show` is called with the program of a step before it runs. With `saves` the first step is the
    one after the last that was saved.
    """
    mesh, first = comm.mesh, 0
    step = spmd(training(job.size, job.numbers, pin(mesh)), regather=regather)
    params, state = _placed(job, comm, device)
    if saves is not None:
        first, (params, state) = saves.last((params, state), job.about, comm)
    for i, tokens in enumerate(job.text()):
        if i < first:
            continue
        here = distribute(tokens.to(device), tokens_layout(mesh), comm)
        number = torch.tensor(job.numbers.rate(i), dtype=torch.float64, device=device)
        rate = distribute(number, mesh.layout(), comm)
        keys: dict[str, Any] = {"key": fold_in(key(job.seed), i)} if job.size.dropout else {}
        if show is not None:
            show(step.trace(params, state, here, rate, **keys))
            show = None
        params, state, loss = step(params, state, here, rate, **keys)
        yield i, loss.full().item()
        if saves is not None:
            saves.after(i + 1, (params, state), job.about, comm)
    if saves is not None:
        saves.end(comm)


def program(
    job: Job, mesh: Mesh, *, cost: CostModel | None = None, regather: bool = False
) -> Program:
    """The program of one step: what every rank computes and sends. No processes needed."""
    step = training(job.size, job.numbers, pin(mesh))
    keys: dict[str, Any] = {"key": key(job.seed)} if job.size.dropout else {}
    return trace(step, *types(job, mesh), cost=cost, regather=regather, **keys)


def types(job: Job, mesh: Mesh) -> tuple[Any, Any, TensorType, TensorType]:
    """The types of the parameters, the optimizer's state, the tokens and the learning rate."""
    start, _ = job.start()
    layouts = weight_layouts(mesh, {name: tuple(p.shape) for name, p in start.items()})
    params = {name: TensorType(p.shape, p.dtype, layouts[name]) for name, p in start.items()}
    state = job.numbers.optimizer(params).init(params)
    tokens = TensorType((job.batch, job.size.length + 1), torch.int64, tokens_layout(mesh))
    return params, state, tokens, TensorType((), torch.float64, mesh.layout())


def pin(mesh: Mesh) -> Pin:
    """The function that the model calls on its activations, to pin their layouts."""
    return lambda x, name: constrain(x, activation_layout(mesh, name))


def _placed(job: Job, comm: Comm[Any], device: str) -> tuple[Any, Any]:
    """The parameters and the optimizer's state before the first step, on the mesh."""
    start, _ = job.start()
    layouts = weight_layouts(comm.mesh, {name: tuple(p.shape) for name, p in start.items()})
    params = {name: distribute(p.to(device), layouts[name], comm) for name, p in start.items()}
    return params, job.numbers.optimizer(params).init(params)
