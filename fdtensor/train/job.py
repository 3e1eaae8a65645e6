"""`Job`: what to train and how, the same on every mesh; its step as a program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.ops.pins import constrain
from fdtensor.ops.random_bits import key
from fdtensor.plans.cost import CostModel
from fdtensor.programs.program import Program
from fdtensor.programs.tracer import trace
from fdtensor.runtime.comm import Comm
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.dtensor import DTensor
from fdtensor.train.gpt import Size
from fdtensor.train.layouts import activation_layout, part_meshes, tokens_layout, weight_layouts
from fdtensor.train.model import Model, Pin
from fdtensor.train.optimizer import AdamW
from fdtensor.train.step import TrainStep, training
from fdtensor.train.text import batches

__all__ = ["Job", "pin", "program", "types"]


@attrs.frozen
class Job:
    """A model, its optimizer, and the text it sees: the same on every mesh."""

    model: Model = attrs.field(factory=Size)
    numbers: AdamW = attrs.field(factory=AdamW)
    steps: int = 200
    batch: int = 16
    seed: int = 0
    dtype: torch.dtype = torch.float32
    """The dtype of parameters, gradients and optimizer."""
    precision: torch.dtype | None = None
    """The dtype in which the model computes; None for that of the parameters."""

    def __attrs_post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise FdtensorError(
                    f"a job cannot have {getattr(self, name)} as its {name}.",
                    hint="Give an int, 1 or more.",
                )

    def start(self, comm: Comm[Any]) -> tuple[Any, Any]:
        """The parameters and the optimizer's state before the first step, on the mesh."""
        stored = self.model.initial(self.seed, self.layouts(comm.mesh), comm)
        params = {
            name: p if p.dtype == self.dtype else p.to(self.dtype) for name, p in stored.items()
        }
        return params, self.numbers.optimizer(params).init(params)

    def start_alone(self) -> tuple[Any, Any]:
        """The same, as plain tensors."""
        leaves, spec = flatten(
            self.start(SimulatedComm(Mesh())), is_leaf=lambda x: isinstance(x, DTensor)
        )
        return unflatten(spec, [x.full() for x in leaves])

    def layouts(self, mesh: Mesh) -> dict[str, Layout]:
        """The layouts of the parameters on a mesh. Raises `MeshError` for axes of other names.

        A parameter that several parts of a pipeline read lies with the first of them.
        """
        parts = self.part_layouts(mesh)
        return {name: layout for part in reversed(parts) for name, layout in part.items()}

    def part_layouts(self, mesh: Mesh) -> list[dict[str, Layout]]:
        """The layouts of the parameters that each part reads, on its mesh; all without "pp"."""
        meshes, shapes, placement = part_meshes(mesh), self.shapes, self.model.placement
        if len(meshes) == 1:
            return [weight_layouts(meshes[0], shapes, placement)]
        parts = self.model.part_names(len(meshes))
        reads = [{name: shapes[name] for name in names} for names in parts]
        return [weight_layouts(m, own, placement) for m, own in zip(meshes, reads, strict=True)]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters by name."""
        return {name: tuple(p.shape) for name, p in self.model.module().named_parameters()}

    @property
    def about(self) -> str:
        """What makes two jobs go the same way, whatever their meshes and numbers of steps."""
        return repr(attrs.evolve(self, steps=1))

    def text(self) -> Iterator[torch.Tensor]:
        """The tokens of each step."""
        length, text = self.model.length, self.model.text()
        return batches(self.seed, self.steps, self.batch, length, text)

    def step(self, mesh: Mesh | None = None) -> TrainStep:
        """A step of training; with a mesh, activations are pinned to their layouts on it."""
        pins = None if mesh is None else pin(mesh)
        return training(self.model, self.numbers, pins, self.precision)


def program(
    job: Job, mesh: Mesh, *, cost: CostModel | None = None, regather: bool = False
) -> Program:
    """The program of one step: what every rank computes and sends. No processes needed."""
    step = job.step(mesh)
    keys: dict[str, Any] = {"key": key(job.seed)} if job.model.dropout else {}
    return trace(step, *types(job, mesh), cost=cost, regather=regather, **keys)


def types(job: Job, mesh: Mesh) -> tuple[Any, Any, TensorType, TensorType]:
    """The types of the parameters, the optimizer's state, the tokens and the learning rate."""
    shapes, layouts = job.shapes, job.layouts(mesh)
    params = {name: TensorType(shape, job.dtype, layouts[name]) for name, shape in shapes.items()}
    state = job.numbers.optimizer(params).init(params)
    tokens = TensorType((job.batch, job.model.length + 1), torch.int64, tokens_layout(mesh))
    return params, state, tokens, TensorType((), torch.float64, mesh.layout())


def pin(mesh: Mesh) -> Pin:
    """The function that the model calls on its activations, to pin their layouts."""
    return lambda x, name: constrain(x, activation_layout(mesh, name))
