"""`Cotangents`: those of a value, in the layouts in which its readers have them.

Where the readers of what several ranks hold have terms of a sum, what they leave here is reduced
once, to where the value came from, in place of an all_reduce for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import (
    current_graph_task,
    forward_active,
    transforms_active,
)
from fdtensor.plans.planner import Plan
from fdtensor.runtime.comm import inside

__all__ = ["Cotangents", "collecting", "cotangents_of"]

Leaves = Sequence[torch.Tensor]
"""The tensors of a value: one, or that of each simulated rank."""


class Cotangents:
    """The cotangents that readers of a value have left in the backward that runs."""

    __slots__ = ("_sums", "_task", "is_closed")

    def __init__(self) -> None:
        self._sums: dict[TensorType, Leaves] = {}
        self._task = -1
        self.is_closed = False
        """Whether readers are to give the cotangent of the value itself: somebody asks for it."""

    def add(self, type: TensorType, leaves: Leaves) -> None:
        """Adds a cotangent of this type."""
        if self._task != current_graph_task():  # a backward before has failed on its way
            self._task, self._sums = current_graph_task(), {}
        known = self._sums.get(type)
        self._sums[type] = leaves if known is None else _added(known, leaves)

    def taken(self) -> dict[TensorType, Leaves]:
        """The sum of each type that this backward has left, which are gone then."""
        sums, self._sums = self._sums, {}
        return sums if self._task == current_graph_task() else {}


def _added(some: Leaves, others: Leaves) -> Leaves:
    return [a + b for a, b in zip(some, others, strict=True)]


def collecting(path: Plan, leaves: Leaves, comm: Any) -> Cotangents | None:
    """What collects the cotangents of the value that a plan has just given to several ranks.

    None where the value has no derivative, or one that a transform of `torch.func` takes.
    """
    if not (leaves[0].requires_grad and _shares(path)) or transforms_active() or forward_active():
        return None
    cotangents = Cotangents()
    if inside(comm, path.dst.mesh):
        node: Any = leaves[0].grad_fn
        node.cotangents = cotangents
        node.set_materialize_grads(False)  # readers that leave theirs give none
    return cotangents


def cotangents_of(leaf: torch.Tensor) -> Cotangents | None:
    """What collects the cotangents of a value, by one of its tensors."""
    return getattr(leaf.grad_fn, "cotangents", None)


def _shares(path: Plan) -> bool:
    """Whether the ranks along some axis hold the same after a plan on one mesh."""
    layout = path.dst.layout
    pairs = zip(layout.placements, layout.mesh.sizes, strict=True)
    return path.src.mesh is layout.mesh and any(
        n > 1 and isinstance(p, Replicate) for p, n in pairs
    )
