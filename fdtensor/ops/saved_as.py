"""`saved_as`: the layout in which a value of a traced function is saved for the backward."""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.layouts.errors import LayoutError
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
    """
    if not isinstance(layout, Layout):
        raise LayoutError(f"{layout!r} is not a Layout.", hint="Write Layout(mesh, placements).")
    if not recording():
        return x
    TensorType(tuple(x.shape), x.dtype, layout)  # raises where the layout does not fit
    return _SavedAs.apply(x, layout)
