"""`lower_steps`: steps of a plan as functional collectives and local ops of one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.torch_private import collectives_on_fakes
from fdtensor.ops.graph import Full, Graph
from fdtensor.ops.recorder import record
from fdtensor.plans.collectives import Step
from fdtensor.plans.collectives.even import Even, bundled
from fdtensor.runtime.process_groups import group_name
from fdtensor.runtime.world import functional

__all__ = ["lower_steps"]

collectives_on_fakes()


@attrs.frozen
class RecordedWorld:
    """The processes around a rank, whose calls are recorded; groups need not be there yet."""

    rank: int
    backend: str
    device: torch.device
    lane: str
    records: bool = True

    def group(self, ranks: tuple[int, ...]) -> str:
        return group_name(ranks, self.lane)

    def collective(self, name: str) -> Callable[..., torch.Tensor]:
        return functional(name)

    def begun(self, name: str) -> Callable[..., Callable[[], torch.Tensor]]:
        collective = functional(name)
        return lambda *args: functools.partial(_same, collective(*args))

    def messages(self, *_: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        raise AssertionError("messages from rank to rank are no functional collectives")


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@remembered(16384)
def lower_steps(
    steps: tuple[Step, ...],
    rank: int,
    backend: str = "gloo",
    device: str = "cpu",
    lane: str = "",
) -> Graph:
    """The calls of `rank` for steps that travel together, as a graph from old to new blocks."""
    world = RecordedWorld(rank, backend, torch.device(device), lane)
    blocks = [Full(step.src.local_shape(rank), step.src.dtype) for step in steps]

    def body(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if len(steps) > 1 and isinstance(steps[0].collective, Even):
            together = bundled(steps, world)
            if together is not None:
                return together(tensors)
        return [_after(step, world, x) for step, x in zip(steps, tensors, strict=True)]

    return record(body, blocks, device=device)


def _after(step: Step, world: RecordedWorld, x: torch.Tensor) -> torch.Tensor:
    return step.collective.on_rank(step, world)(x, False)
