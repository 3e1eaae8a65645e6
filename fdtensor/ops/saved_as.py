"""`saved_as`: the layout in which a value of a traced function is saved for the backward."""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.layouts.expected import no_layout, refuse_no_tensor
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.pins import behind
from fdtensor.ops.saved_values import SAVED_AS
from fdtensor.ops.transparent import recording

__all__ = ["saved_as"]


class _SavedAs(torch.autograd.Function):
    """The identity, which marks a value."""

    @staticmethod
    def forward(x: torch.Tensor, layout: Layout) -> torch.Tensor:
        return SAVED_AS(x, repr(layout))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:  # type: ignore[override]
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, layout: Layout) -> Any:  # type: ignore[override]
        return _SavedAs.apply(x.movedim(in_dims[0], 0), behind(layout)), 0


def saved_as(x: Any, layout: Layout) -> Any:
    """`x`, which is saved for the backward in this layout where a function is traced.

    Nothing else changes: the forward reads `x` in any layout, while a backward moves the saved
    value to where it needs it. Views of the result count as the result, values computed from it do
    not: mark the values that ops read, such as the result of `constrain`. Outside of a traced
    function this is `x` itself; `input_reshard` is for modules there.

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((4, 4), torch.float32, mesh.layout())
    >>> def loss(x):
    ...     return (saved_as(x.exp(), mesh.layout("x")) ** 2).sum()

    >>> print(trace(torch.func.grad(loss), x))
    loss on Mesh(x=2)
      in   a:f32[4,4]
      b:f32[4@x,4] = slice[axis=x dim=0] a
      c:f32[4@x,4] = exp b
      d:f32[]      = full [] 1 dtype=float32 device=device(type='cpu')
      e:f32[4@x,4] = expand d [4,4]
      f:f32[4@x,4] = alias c  kept
      g:f32[4@x,4] = pow.Tensor_Scalar f 1.0
      h:f32[4@x,4] = mul.Scalar g 2.0
      i:f32[4@x,4] = mul.Tensor e h
      j:f32[4@x,4] = mul.Tensor i f
      k:f32[4,4]   = all_gather[axis=x dim=0] j  32 B
      out  k
    1 collective, 32 B received per rank
    """
    if not isinstance(layout, Layout):
        raise no_layout(layout)
    if not recording():
        return x
    of_record = getattr(type(x), "saved_as", None)
    if of_record is not None:  # a DTensor of a function that is traced
        return of_record(x, layout)
    refuse_no_tensor(x)
    TensorType(tuple(x.shape), x.dtype, layout)  # raises where the layout does not fit
    return _SavedAs.apply(x, layout)
