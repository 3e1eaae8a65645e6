"""`constrain`: pins the layout of a value of a traced function."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from fdtensor.layouts.expected import no_layout, refuse_no_tensor
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut, Partial, Ragged, Replicate, Shard, StridedShard
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Call
from fdtensor.ops.saved_values import CONSTRAIN, SAVED
from fdtensor.ops.transparent import recording

__all__ = ["behind", "constrain", "pinned"]


class _Constrain(torch.autograd.Function):
    """The identity, which pins the layout of a value and that of its cotangent."""

    @staticmethod
    def forward(x: torch.Tensor, layout: Layout, back: Layout) -> torch.Tensor:
        return CONSTRAIN(x, repr(layout))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.layout, ctx.back = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _Constrain.apply(grad, ctx.back, ctx.back), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:  # type: ignore[override]
        return _Constrain.apply(tangent, ctx.layout, ctx.back)  # type: ignore[return-value]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        x, layout, back = args
        x = x.movedim(in_dims[0], 0)
        return _Constrain.apply(x, behind(layout), behind(back)), 0


def behind(layout: Layout) -> Layout:
    """The layout of a stack of tensors, along a new first dim that is not cut."""
    moved = [attrs.evolve(p, dim=p.dim + 1) if isinstance(p, Cut) else p for p in layout.placements]
    return Layout(layout.mesh, moved, {d + 1: axes for d, axes in layout.order})


def constrain(x: Any, layout: Layout) -> Any:
    """`x`, whose layout is pinned where a function is traced; elsewhere just `x`.

    The cotangent of `x` is pinned to the same layout, with Replicate for Partial.

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout("x"))
    >>> print(trace(lambda x: constrain(x * 2, mesh.layout(None, "x")), x))
    <lambda> on Mesh(x=2)
      in   a:f32[4@x,6]
      b:f32[4,6@x] = all_to_all[axis=x dim=0->1] a  24 B
      c:f32[4,6@x] = mul.Tensor b 2
      d:f32[4@x,6] = all_to_all[axis=x dim=1->0] c  24 B
      out  d
    2 collectives, 48 B received per rank
    """
    if not isinstance(layout, Layout):
        raise no_layout(layout)
    if not recording():
        return x
    refuse_no_tensor(x)
    whole = TensorType(tuple(x.shape), x.dtype, layout)
    return _Constrain.apply(x, layout, whole.cotangent().layout)


def pinned(call: Call) -> Layout | None:
    """The layout that a call of `constrain` or `saved_as` pins, or None for another call."""
    return parse_layout(call.args[1]) if call.op in (CONSTRAIN, SAVED) else None


@remembered(1024)
def parse_layout(text: str) -> Layout:
    """The layout whose repr this is."""
    return eval(text, _LAYOUT_NAMES)


_LAYOUT_NAMES = {
    kind.__name__: kind for kind in (Layout, Mesh, Replicate, Shard, StridedShard, Ragged, Partial)
}
