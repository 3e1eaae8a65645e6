"""`constrain`: pins the layout of a value of a traced function."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.expected import no_layout, refuse_no_tensor
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut, Partial, Ragged, Replicate, Shard, StridedShard
from fdtensor.layouts.prefixes import layout_of_each
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import transforms_around
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.ops.graph import Call
from fdtensor.ops.saved_values import CONSTRAIN, SAVED
from fdtensor.ops.transparent import recording

__all__ = ["axis_of_map", "behind", "constrain", "pinned", "stacked_along", "stacked_axes"]


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
        x, axis = x.movedim(in_dims[0], 0), axis_of_map()
        return _Constrain.apply(x, behind(layout, axis), behind(back, axis)), 0


def behind(layout: Layout, axis: str | None = None) -> Layout:
    """The layout of a stack of tensors, along a new first dim that an axis cuts, or none."""
    moved = [attrs.evolve(p, dim=p.dim + 1) if isinstance(p, Cut) else p for p in layout.placements]
    stacked = Layout(layout.mesh, moved, {d + 1: axes for d, axes in layout.order})
    if axis is None:
        return stacked
    if not isinstance(stacked[axis], Replicate):
        raise LayoutError(
            f"axis {axis!r} cannot cut the dim of vmap: {layout} has it at {layout[axis]}.",
            hint="Let spmd_axis_name be an axis that the layouts inside leave free.",
        )
    return stacked.placed(axis, Shard(0))


class _Stacked(threading.local):
    """The axis that cuts the dim of each `vmap` of this thread, by the transforms around."""

    def __init__(self) -> None:
        self.axes: dict[int, str] = {}


_STACKED = _Stacked()


@contextlib.contextmanager
def stacked_along(axis: str | None) -> Generator[None]:
    """A context directly inside of a `vmap`, whose dim an axis cuts where layouts are pinned."""
    depth = transforms_around()
    if axis is None:
        yield
        return
    _STACKED.axes[depth] = axis
    try:
        yield
    finally:
        del _STACKED.axes[depth]


def axis_of_map() -> str | None:
    """The axis that cuts the dim of the `vmap` whose rule runs here, if one does."""
    return _STACKED.axes.get(transforms_around() + 1)


def stacked_axes() -> tuple[str, ...]:
    """The axes that cut the dims of the maps around this code."""
    around = transforms_around()
    return tuple([axis for depth, axis in _STACKED.axes.items() if depth <= around])


def constrain(x: Any, layout: Any) -> Any:
    """`x`, whose layout is pinned where a function is traced; elsewhere just `x`.

    The cotangent of `x` is pinned to the same layout, with Replicate for Partial. `x` may be a
    pytree, and `layout` one for all or a pytree of layouts that is a prefix of it. A layout may be
    on another mesh of the same ranks than the arguments of the function, where the axes of both are
    products of axes that they could share. DTensors are redistributed, everywhere.

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
    if isinstance(x, torch.Tensor):
        return _constrained(x, layout)
    leaves, spec = flatten(x, is_leaf=_moves)
    pairs = zip(leaves, layout_of_each(layout, spec), strict=True)
    return unflatten(spec, [_constrained(leaf, wanted) for leaf, wanted in pairs])


def _constrained(x: Any, layout: Any) -> Any:
    """A tensor or DTensor whose layout is pinned."""
    if not isinstance(layout, Layout):
        raise no_layout(layout)
    if _moves(x):
        return x.redistribute(layout)
    refuse_no_tensor(x)
    if not recording():
        return x
    if not any(isinstance(size, torch.SymInt) for size in x.shape):  # else at each size
        TensorType(tuple(x.shape), x.dtype, layout)  # raises where it cannot be
    return _Constrain.apply(x, layout, layout.reduced())


def _moves(node: Any) -> bool:
    """Whether a node of a pytree is a DTensor."""
    return hasattr(node, "redistribute")


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
