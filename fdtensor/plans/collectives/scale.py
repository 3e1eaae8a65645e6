"""`Scale`: terms of a sum become terms of an average, or back."""

from __future__ import annotations

from math import prod

import attrs
import torch

from fdtensor.layouts.placement import ReduceOp
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collectives.base import Axes, Change, Step, axes_fact
from fdtensor.plans.collectives.local import Local

__all__ = ["Scale", "scalable"]

_WIDE = {torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


@attrs.frozen(eq=False)
class Scale(Local):
    """Terms of a sum along `axes` become terms of an average, or back, by a power of two.

    `+[A] +[B]  ->  +[2A] +[2B]`

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout(partial={"x": "sum"}))
    >>> print(plan(x, mesh.layout(partial={"x": "avg"})))
    f32[4,6]{sum:x} -> f32[4,6]{avg:x} on Mesh(x=2)
      scale[axis=x reduce_op=avg]  f32[4,6]{avg:x}  0 B
    1 step, 0 B received per rank
    """

    axes: Axes
    reduce_op: ReduceOp
    """The reduction that is pending afterwards."""

    name = "scale"
    change = ("partial", "partial")

    @classmethod
    def between(cls, change: Change) -> Scale | None:
        same = change.src.cuts == change.dst.cuts
        if not same or not scalable(change.src.type, change.dst.type):
            return None
        return cls(change.names, change.dst.type.layout.partial[change.names[0]])

    def facts(self) -> list[str]:
        return [*axes_fact(self.axes), f"reduce_op={self.reduce_op}"]

    def on_block(self, step: Step, rank: int, block: torch.Tensor) -> torch.Tensor:
        count = prod(step.src.mesh.axis_size(axis) for axis in self.axes)
        scaled = block * count if self.reduce_op == "avg" else block / count
        return scaled.contiguous()  # what a step gives is, whatever it took


def scalable(src: TensorType, dst: TensorType) -> bool:
    """Whether partial axes that both have go from sum to avg, or back, by an exact factor.

    Powers of two are exact; float16 is left out, for it would overflow or lose small values.
    """
    before, after = src.layout.partial, dst.layout.partial
    common = [axis for axis in before if axis in after]
    factor = prod(src.mesh.axis_size(axis) for axis in common)
    ops = {before[axis] for axis in common} | {after[axis] for axis in common}
    return ops == {"sum", "avg"} and src.dtype in _WIDE and factor & (factor - 1) == 0
