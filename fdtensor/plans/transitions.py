"""The transitions: how one axis (or several at once) goes from one placement to another.

    from \\ to     Replicate     Shard(j)                  Partial
    Replicate     -             slice                     mask
    Shard(i)      all_gather    all_to_all, exchange      pad (avg: all_gather, then mask)
    Partial       all_reduce    reduce_scatter            scale (sum to avg and back),
                                                          else reduce_scatter, then pad

A named collective needs even blocks, innermost cuts and ascending ranks; an `Exchange` does every
other case with the same bytes: uneven, strided, ragged, swapped orders, outer cuts, other meshes.
"""

from __future__ import annotations

from fdtensor.layouts.placement import Partial, Placement, Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collectives import (
    ALL,
    Change,
    Collective,
    Step,
    by_exchange,
    scalable,
)
from fdtensor.plans.normal_type import NormalType, dim_to_cut, normalized

__all__ = ["named", "transition"]


def transition(src: TensorType, axis: str, to: Placement) -> tuple[Step, ...]:
    """The steps that take `axis` of `src` to placement `to`: one, but where the table says two.

    No steps where the axis is there already. Raises `LayoutError` where `to` cannot be.

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout("x"))
    >>> [str(step.collective) for step in fd.plans.transition(x, "x", Replicate())]
    ['all_gather[axis=x dim=0]']
    """
    was = src.layout[axis]
    dst = src.placed(axis, to)
    if was == to or src.mesh.axis_size(axis) == 1:
        return ()
    match was, to:
        case Partial(), Partial(reduce_op):
            if scalable(src, dst):
                return (_one(src, dst),)
            through: Placement = Replicate()
            if src.shape and reduce_op != "avg":
                through = Shard(dim_to_cut(src, src.mesh.axis(axis)))
            middle = src.placed(axis, through)
            return (_one(src, middle), *transition(middle, axis, to))
        case Shard(), Partial(reduce_op) if reduce_op != "avg" and named(src, dst):
            return (_one(src, dst),)
        case Replicate(), Partial():
            return (_one(src, dst),)
        case _, Partial():
            middle = src.placed(axis, Replicate())
            return (_one(src, middle), *transition(middle, axis, to))
        case _:
            return (_one(src, dst),)


def _one(src: TensorType, dst: TensorType) -> Step:
    collective = named(src, dst)
    return Step(collective, src, dst) if collective else by_exchange(src, dst)


def named(src: TensorType, dst: TensorType) -> Collective | None:
    """The one named collective that takes `src` to `dst`, or None where there is none.

    Several axes that change alike share it. It receives what the exchange would, or for an
    all_reduce what a reduce_scatter and an all_gather would.
    """
    before, after = normalized(src), normalized(dst)
    if src.mesh is not dst.mesh:
        return _making(Change(before, after, ()), ("mesh", "mesh"))
    changes = [_change(before, after, axis) for axis in range(src.mesh.ndim)]
    moving = tuple(axis for axis, change in enumerate(changes) if change is not None)
    kinds = {change for change in changes if change is not None}
    return _making(Change(before, after, moving), *kinds) if len(kinds) == 1 else None


def _making(change: Change, between: tuple[str, str]) -> Collective | None:
    """The collective that makes a change between these kinds of placement."""
    for kind in _KINDS.get(between, ()):
        collective = kind.between(change)
        if collective is not None:
            return collective
    return None


def _kinds() -> dict[tuple[str, str], list[type[Collective]]]:
    """The kinds of collectives by the change that they make."""
    kinds: dict[tuple[str, str], list[type[Collective]]] = {}
    for kind in ALL:
        if kind.change is not None:
            kinds.setdefault(kind.change, []).append(kind)
    return kinds


_KINDS = _kinds()


def _change(a: NormalType, b: NormalType, axis: int) -> tuple[str, str] | None:
    """The placements of an axis before and after, or None where it stays as it is."""
    if a.mesh.sizes[axis] == 1:
        return None
    before, after = a.type.layout.placements[axis], b.type.layout.placements[axis]
    return None if before == after else (_kind(before), _kind(after))


def _kind(placement: Placement) -> str:
    match placement:
        case Replicate():
            return "replicate"
        case Partial():
            return "partial"
        case _:
            return "shard"
