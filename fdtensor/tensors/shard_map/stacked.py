"""The tensors of all ranks as one: a tensor with a first dim that has an entry for each rank.

So a function of local tensors is one of full tensors, mapped over that dim, which all axes of the
mesh cut, but for those that cut the dims of maps around it. A named collective is what moves
between its entries, pinned to the layouts of a move.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import (
    Partial,
    Placement,
    Ragged,
    ReduceOp,
    Replicate,
    Shard,
    StridedShard,
)
from fdtensor.ops.pins import constrain
from fdtensor.ops.rank_dims import exchanged, first, same
from fdtensor.tensors.shard_map.moves import LocalCollective, Permute

__all__ = ["carried", "joined", "numbered", "ranks_of", "stacked"]

REDUCED: dict[ReduceOp, Any] = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


def ranks_of(mesh: Mesh, besides: Sequence[str]) -> tuple[str, ...]:
    """The axes that the dim of the ranks has: all where no others are left."""
    return tuple([a for a in mesh.axes if a not in besides]) or mesh.axes


def numbered(mesh: Mesh, axes: Sequence[str]) -> torch.Tensor:
    """The number of each rank, by its place along the axes."""
    sizes = [mesh.axis_size(a) for a in axes]
    return _flat(_split(torch.arange(prod(sizes)), 0, sizes), mesh, axes)


def stacked(x: torch.Tensor, layout: Layout, ranks: Sequence[str]) -> torch.Tensor:
    """The blocks of a full tensor in a layout, one for each rank."""
    mesh, x = layout.mesh, constrain(x, layout)
    x = constrain(x, _as_merged(layout, x.dim()))
    labels: list[str | int] = []
    for d in range(x.dim()):
        axes = layout.cuts(d)
        at = len(labels)
        if axes:
            _refuse_uneven(x.shape[at], d, axes, layout)
            sizes = [mesh.axis_size(a) for a in axes]
            x = x.unflatten(at, (*sizes, x.shape[at] // prod(sizes)))
        labels += [*axes, d]
    for axis in [a for a in ranks if a not in labels]:
        count = mesh.axis_size(axis)
        pending = axis in layout.partial
        x = first(x, 0, count) if pending else x.unsqueeze(0).expand(count, *x.shape)
        labels.insert(0, axis)
    order: list[str | int] = [*ranks, *range(len(labels) - len(ranks))]
    return _flat(_ordered(x, [labels.index(label) for label in order]), mesh, ranks)


def joined(x: torch.Tensor, layout: Layout, ranks: Sequence[str]) -> torch.Tensor:
    """The full tensor in a layout of which these are the blocks, one for each rank."""
    x = _apart(x, layout.mesh, ranks)
    labels: list[str | int] = [*ranks, *range(x.dim() - len(ranks))]
    cut = {a for d in range(x.dim() - len(ranks)) for a in layout.cuts(d)}
    for axis in [a for a in ranks if a not in cut]:
        at = labels.index(axis)
        op = layout.partial.get(axis)
        if op is None:
            x = same(x, at)
        elif op in REDUCED:
            x = REDUCED[op](x, at)
        else:
            raise _not_inside(f"results that are pending {op}")
        labels.remove(axis)
    order: list[str | int] = []
    ndim = len([label for label in labels if isinstance(label, int)])
    for d in range(ndim):
        order += [*layout.cuts(d), d]
    x = _ordered(x, [labels.index(label) for label in order])
    for d in range(ndim):
        count = len(layout.cuts(d))
        if count:
            x = x.flatten(d, d + count)
    return constrain(constrain(x, _as_merged(layout, ndim)), layout)


def _as_merged(layout: Layout, ndim: int) -> Layout:
    """The same layout, as dims that are merged have it, each of which an axis cuts."""
    mesh = layout.mesh
    placements = list(layout.placements)
    order: dict[int, tuple[str, ...]] = {}
    for d in range(ndim):
        axes, blocks = layout.cuts(d), 1
        for axis in axes:
            if blocks > 1:
                placements[mesh.axis(axis)] = StridedShard(d, blocks)
            blocks *= mesh.axis_size(axis)
        if len(axes) > 1:
            order[d] = tuple(reversed(axes))
    return Layout(mesh, placements, order)


def carried(
    x: torch.Tensor,
    move: LocalCollective,
    mesh: Mesh,
    ranks: Sequence[str],
    maps: Sequence[str | None] = (),
) -> torch.Tensor:
    """The tensors of all ranks after a collective, in which the dims of `move` count from 1.

    After the dim of the ranks there is one for each map around, which one of `maps` cuts, or none.
    """
    x = _apart(x, mesh, ranks, maps)
    axes, others = move.axes, [a for a in ranks if a not in move.axes]
    ordered = [*axes, *others]
    x = _ordered(x, [*map(ranks.index, ordered), *range(len(ranks), x.dim())])
    count = len(axes)
    if isinstance(move, Permute):
        sizes = x.shape[:count]
        x = _split(exchanged(_merged(x, 0, count), 0, move.perm), 0, sizes)
    else:
        x = _one_of_each_coset(x, count, len(others), move.src)
        for placement in (move.src, move.dst):
            x = constrain(x, _layout(mesh, axes, [*others, *maps], len(others), placement))
        x = _of_ranks(x, [mesh.axis_size(a) for a in axes], len(others), move.dst)
    back = [*map(ordered.index, ranks), *range(len(ranks), x.dim())]
    return _flat(_ordered(x, back), mesh, ranks, maps)


def _one_of_each_coset(
    x: torch.Tensor, count: int, others: int, placement: Placement
) -> torch.Tensor:
    """The tensor that the ranks along the first dims hold in this placement."""
    match placement:
        case Partial(op) if op in REDUCED:
            return REDUCED[op](x, list(range(count)))
        case Ragged(dim, sizes) if len({*sizes}) == 1:
            at = others + dim - 1
            order = [*range(count, count + at), *range(count), *range(count + at, x.dim())]
            return _ordered(x, order).flatten(at, at + count)
        case _:
            raise _not_inside(f"tensors that are {placement}")


def _of_ranks(
    x: torch.Tensor, sizes: Sequence[int], others: int, placement: Placement
) -> torch.Tensor:
    """The tensors of the ranks along new first dims, which hold one tensor in this placement."""
    match placement:
        case Replicate():
            return x.expand(*sizes, *x.shape)
        case Ragged(dim, blocks) if len({*blocks}) == 1:
            at, count = others + dim - 1, len(sizes)
            x = x.unflatten(at, (*sizes, x.shape[at] // prod(sizes)))
            order = [*range(at, at + count), *range(at), *range(at + count, x.dim())]
            return _ordered(x, order)
        case _:
            raise _not_inside(f"tensors that are {placement}")


def _layout(
    mesh: Mesh, axes: Sequence[str], first: Sequence[str | None], others: int, placement: Placement
) -> Layout:
    """Other axes and maps cut the first dims, one each; `axes` have the rest in this placement.

    The dim that they cut is counted after those of the `others`.
    """
    dims: list[Any] = [*first]
    pending: dict[str, ReduceOp] = {}
    match placement:
        case Partial(op):
            pending = dict.fromkeys(axes, op)
        case Ragged(dim):
            dims += [None] * (others + dim - 1 - len(dims)) + [tuple(axes)]
    return mesh.layout(*dims, partial=pending)


def _flat(
    x: torch.Tensor, mesh: Mesh, axes: Sequence[str], maps: Sequence[str | None] = ()
) -> torch.Tensor:
    """The first dims, one for each axis, as one dim that all cut."""
    return _merged(constrain(x, mesh.layout(*axes, *maps)), 0, len(axes))


def _apart(
    x: torch.Tensor, mesh: Mesh, axes: Sequence[str], maps: Sequence[str | None] = ()
) -> torch.Tensor:
    x = _split(x, 0, [mesh.axis_size(a) for a in axes])
    return constrain(x, mesh.layout(*axes, *maps))


def _ordered(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return x if [*dims] == [*range(x.dim())] else x.permute([*dims])


def _merged(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    return x if count == 1 else x.flatten(dim, dim + count - 1)


def _split(x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    return x if len(sizes) == 1 else x.unflatten(dim, [*sizes])


def _refuse_uneven(size: int, dim: int, axes: Sequence[str], layout: Layout) -> None:
    count = prod(layout.mesh.axis_size(a) for a in axes)
    plain = all(isinstance(layout[a], Shard) for a in axes)
    if size % count or not plain:
        what = f"dim {dim} of {size} in {count} blocks" if plain else f"dim {dim} by {layout}"
        raise _not_inside(f"cuts of {what}")


def _not_inside(what: str) -> LayoutError:
    return LayoutError(
        f"shard_map inside of a traced function does not take {what}.",
        hint="Cut evenly by Shard there, pad the dim, or call shard_map outside of the function.",
    )
