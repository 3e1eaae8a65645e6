"""`owners`: the type in which each element's pending terms meet at one rank."""

from __future__ import annotations

from collections.abc import Sequence

from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.movement import Movement
from fdtensor.plans.normal_type import dim_to_cut, normalized

__all__ = ["cut_like", "owners"]


def owners(moves: Movement, spread: bool = False, near: bool = True) -> TensorType:
    """The destination cut further by its free axes, so that each element's terms meet at one owner.

    With `spread` also by the axes that are free on both sides: that is the least total, but the
    second exchange then talks across them. Those who are `near` own parts of blocks of the source,
    so that fewer ranks talk, but not all have a term of what they own. A 0-d tensor is owned by all
    who want it.
    """
    src, dst = moves.src.type, moves.dst.type
    if not dst.shape:
        return dst
    idle = moves.src.free if moves.same_mesh and not spread else ()
    return cut_like(src, dst, [i for i in moves.dst.free if i not in idle], near)


def cut_like(
    src: TensorType, type: TensorType, axes: Sequence[int], near: bool = True
) -> TensorType:
    """`type` cut further by `axes`.

    First come the axes that cut the source, in its order and on the same dim: their ranks hold
    terms of these very blocks. The others cut as `dim_to_cut` says.
    """
    same = src.mesh is type.mesh
    dims = {i: d for d, cuts in enumerate(normalized(src).cuts) for i, _, _ in cuts} if same else {}
    order = list(dims)
    for i in sorted(axes, key=lambda i: order.index(i) if i in dims else len(order) + i):
        dim = dim_to_cut(type, i, dims.get(i), src if same else None, near)
        type = type.with_layout(type.layout.split(type.mesh.axes[i], dim))
    return type
