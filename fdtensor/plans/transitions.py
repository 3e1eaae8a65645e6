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

import functools
from math import prod

import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut, Partial, Placement, ReduceOp, Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Exchange,
    Mask,
    Pad,
    ReduceScatter,
    Scale,
    Slice,
    Step,
    Way,
)
from fdtensor.plans.messages import Grid, grid, roomiest, talk

__all__ = ["by_exchange", "named", "scalable", "transition"]

Cuts = tuple[tuple[int, int, Cut], ...]

REPEATABLE: frozenset[ReduceOp] = frozenset({"avg", "max", "min", "band", "bor"})
"""The reduce ops that give back a value which every rank holds as its term."""

_WIDE = {torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


def transition(src: TensorType, axis: str, to: Placement) -> tuple[Step, ...]:
    """The steps that take `axis` of `src` to placement `to`: one, but where the table says two.

    No steps where the axis is there already. Raises `LayoutError` where `to` cannot be.
    """
    was = src.layout[axis]
    dst = src.placed(axis, to)
    if was == to or src.mesh.axis_size(axis) == 1:
        return ()
    match was, to:
        case Partial(), Partial(reduce_op):
            if scalable(src, dst):
                return (_one(src, dst),)
            dims = src.shape
            through: Placement = Shard(roomiest(src, src.mesh.axis(axis))) if dims else Replicate()
            middle = src.placed(axis, through if reduce_op != "avg" else Replicate())
            return (_one(src, middle), *transition(middle, axis, to))
        case Shard(), Partial(reduce_op) if reduce_op != "avg" and named(src, dst):
            return (_one(src, dst),)
        case Replicate(), Partial():
            return (_one(src, dst),)
        case _, Partial():
            middle = src.placed(axis, Replicate())
            return (_one(src, middle), *transition(middle, axis, to))
    return (_one(src, dst),)


def _one(src: TensorType, dst: TensorType) -> Step:
    collective = named(src, dst)
    return Step(collective, src, dst) if collective else by_exchange(src, dst)


def by_exchange(
    src: TensorType, dst: TensorType, way: Way = "peer_to_peer", pieces: int = 1
) -> Step:
    """The exchange from `src` to `dst`, which reduces the partial axes that `dst` does not have."""
    who = talk(src, dst)
    names = src.mesh.axes
    axes = None if who.axes is None else tuple(names[a] for a in who.axes)
    reduce_op = src.layout.partial[names[who.reduced[0]]] if who.reduced else None
    return Step(Exchange(axes, reduce_op, way, pieces), src, dst)


def scalable(src: TensorType, dst: TensorType) -> bool:
    """Whether partial axes that both have go from sum to avg, or back, by an exact factor.

    Powers of two are exact; float16 is left out, for it would overflow or lose small values.
    """
    before, after = src.layout.partial, dst.layout.partial
    common = [axis for axis in before if axis in after]
    factor = prod(src.mesh.axis_size(axis) for axis in common)
    ops = {before[axis] for axis in common} | {after[axis] for axis in common}
    return ops == {"sum", "avg"} and src.dtype in _WIDE and factor & (factor - 1) == 0


def named(src: TensorType, dst: TensorType) -> Collective | None:
    """The one named collective that takes `src` to `dst`, or None where there is none.

    Several axes that change alike share it. It receives what the exchange would, or for an
    all_reduce what a reduce_scatter and an all_gather would.
    """
    if src.mesh is not dst.mesh:
        return _broadcast(src, dst)
    a, b = grid(src), grid(dst)
    names = src.mesh.axes
    moving = [axis for axis in range(src.mesh.ndim) if _change(a, b, axis)]
    changes = {_change(a, b, axis) for axis in moving}
    if len(changes) != 1:
        return None
    axes = tuple(names[axis] for axis in moving)
    match changes.pop():
        case ("replicate", "shard"):
            tails = _tails(a.cuts, b.cuts)
            return Slice(*_named(tails, names)) if tails else None
        case ("shard", "replicate"):
            tails = _tails(b.cuts, a.cuts)
            even = tails and _even(a, tails) and _ascending(src.mesh)
            return AllGather(*_named(tails, names)) if tails and even else None
        case ("partial", "replicate") if a.cuts == b.cuts:
            return AllReduce(axes, src.layout.partial[axes[0]])
        case ("partial", "shard"):
            tails = _tails(a.cuts, b.cuts)
            if not tails or not _even(b, tails) or not _ascending(src.mesh):
                return None
            return ReduceScatter(*_named(tails, names), src.layout.partial[axes[0]])
        case ("replicate", "partial") if a.cuts == b.cuts:
            return Mask(axes, dst.layout.partial[axes[0]])
        case ("partial", "partial") if a.cuts == b.cuts and scalable(src, dst):
            return Scale(axes, dst.layout.partial[axes[0]])
        case ("shard", "partial"):
            tails = _tails(b.cuts, a.cuts)
            reduce_op = dst.layout.partial[axes[0]]
            if not tails or reduce_op == "avg":
                return None
            return Pad(*_named(tails, names), reduce_op)
        case ("shard", "shard") if _ascending(src.mesh):
            return _all_to_all(a, b, names)
    return None


@functools.lru_cache(maxsize=1024)
def _ascending(mesh: Mesh) -> bool:
    """Whether ranks count up along the mesh, as they do in a process group."""
    return isinstance(mesh.order, range) or list(mesh.order) == sorted(mesh.order)


def _change(a: Grid, b: Grid, axis: int) -> tuple[str, str] | None:
    """What an axis does before and after, or None where it stays as it is."""
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


def _tails(outer: tuple[Cuts, ...], cuts: tuple[Cuts, ...]) -> list[tuple[int, int]] | None:
    """The axis and dim of each cut that `cuts` has beyond `outer`; None if it is no extension."""
    tails = []
    for d, (shorter, longer) in enumerate(zip(outer, cuts, strict=True)):
        if longer[: len(shorter)] != shorter:
            return None
        tails += [(axis, d) for axis, _, _ in longer[len(shorter) :]]
    return tails


def _named(
    tails: list[tuple[int, int]], names: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return tuple(names[axis] for axis, _ in tails), tuple(d for _, d in tails)


def _even(cut: Grid, tails: list[tuple[int, int]]) -> bool:
    """Whether every rank has a block of the same size in the dims of the tails."""
    return all(
        all(isinstance(placement, Shard) for _, _, placement in cut.cuts[d])
        and cut.shape[d] % prod(count for _, count, _ in cut.cuts[d]) == 0
        for _, d in tails
    )


def _all_to_all(a: Grid, b: Grid, names: tuple[str, ...]) -> AllToAll | None:
    """The axes that leave the inner cuts of one dim for those of another, in the same order."""
    differ = [d for d in range(len(a.shape)) if a.cuts[d] != b.cuts[d]]
    if len(differ) != 2:
        return None
    i, j = differ if len(a.cuts[differ[0]]) > len(b.cuts[differ[0]]) else differ[::-1]
    lost, gained = _tails((b.cuts[i],), (a.cuts[i],)), _tails((a.cuts[j],), (b.cuts[j],))
    if not lost or not gained:
        return None
    axes = [axis for axis, _ in lost]
    if axes != [axis for axis, _ in gained]:
        return None
    even = _even(a, [(axis, i) for axis in axes]) and _even(b, [(axis, j) for axis in axes])
    return AllToAll(tuple(names[axis] for axis in axes), i, j) if even else None


def _broadcast(src: TensorType, dst: TensorType) -> Broadcast | None:
    whole = not grid(dst).cut_axes and not dst.layout.partial and not src.layout.partial
    if src.mesh.size == 1 and dst.mesh.size > 2 and whole:
        return Broadcast(src.mesh.order[0])
    return None
