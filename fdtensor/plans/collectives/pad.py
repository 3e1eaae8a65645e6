"""`Pad`: blocks become pending terms of the whole."""

from __future__ import annotations

import attrs
import torch

from fdtensor.layouts.placement import ReduceOp
from fdtensor.plans.collectives.base import Axes, Change, Dims, Step, axes_fact, dims_fact, tails
from fdtensor.plans.collectives.local import Local, common, copy_common
from fdtensor.plans.reductions import identity

__all__ = ["Pad"]


@attrs.frozen(eq=False)
class Pad(Local):
    """Blocks along `axes` become pending terms: identity elements all around the block.

    `[A] [B]  ->  +[A 0] +[0 B]`

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout("x"))
    >>> print(plan(x, mesh.layout(partial={"x": "sum"})))
    f32[4@x,6] -> f32[4,6]{sum:x} on Mesh(x=2)
      pad[axis=x dim=0 reduce_op=sum]  f32[4,6]{sum:x}  0 B
    1 step, 0 B received per rank
    """

    axes: Axes
    dims: Dims
    reduce_op: ReduceOp

    name = "pad"
    change = ("shard", "partial")

    @classmethod
    def between(cls, change: Change) -> Pad | None:
        cuts = tails(change, change.src, change.dst)
        reduce_op = change.dst.type.layout.partial[change.names[0]]
        return None if cuts is None or reduce_op == "avg" else cls(*cuts, reduce_op)

    def facts(self) -> list[str]:
        return [*axes_fact(self.axes), *dims_fact(self.dims), f"reduce_op={self.reduce_op}"]

    def on_block(self, step: Step, rank: int, block: torch.Tensor) -> torch.Tensor:
        shared = common(step, rank)
        return copy_common(shared, block, identity(self.reduce_op, shared.shape, block))
