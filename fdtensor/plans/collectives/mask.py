"""`Mask`: a replicated value becomes pending terms."""

from __future__ import annotations

from collections.abc import Hashable

import attrs
import torch

from fdtensor.layouts.placement import ReduceOp
from fdtensor.plans.collectives.base import Axes, Change, Step, axes_fact
from fdtensor.plans.collectives.local import Local
from fdtensor.plans.local_tensors import copied
from fdtensor.plans.reductions import REPEATABLE, identity

__all__ = ["Mask"]


@attrs.frozen(eq=False)
class Mask(Local):
    """A replicated value becomes pending terms along `axes`.

    `[A] [A]  ->  +[A] +[0]`

    The first rank keeps it and the others hold identity elements; for avg, max, min, band and bor
    every rank keeps it.

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout())
    >>> print(plan(x, mesh.layout(partial={"x": "sum"})))
    f32[4,6] -> f32[4,6]{sum:x} on Mesh(x=2)
      mask[axis=x reduce_op=sum]  f32[4,6]{sum:x}  0 B
    1 step, 0 B received per rank
    """

    axes: Axes
    reduce_op: ReduceOp

    name = "mask"
    change = ("replicate", "partial")

    @classmethod
    def between(cls, change: Change) -> Mask | None:
        if change.src.cuts != change.dst.cuts:
            return None
        return cls(change.names, change.dst.type.layout.partial[change.names[0]])

    def facts(self) -> list[str]:
        return [*axes_fact(self.axes), f"reduce_op={self.reduce_op}"]

    def depends_on(self, step: Step, rank: int) -> Hashable:
        return self._is_first(step, rank), step.dst.local_shape(rank)

    def on_block(self, step: Step, rank: int, block: torch.Tensor) -> torch.Tensor:
        if self._is_first(step, rank) or self.reduce_op in REPEATABLE:
            return copied(block)
        return identity(self.reduce_op, step.dst.local_shape(rank), block)

    def _is_first(self, step: Step, rank: int) -> bool:
        """Whether a rank is the first along the axes."""
        mesh = step.dst.mesh
        coord = mesh.coord(rank)
        assert coord is not None
        return all(coord[mesh.axis(axis)] == 0 for axis in self.axes)
