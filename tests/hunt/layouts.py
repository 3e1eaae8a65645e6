"""Random meshes, and random layouts of a tensor on one."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import Any

import torch

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Placement, Ragged, Replicate, Shard, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from tests.hunt.values import kind_of

__all__ = ["drawn_layout", "drawn_mesh"]

MOST_RANKS = 12
REDUCTIONS = {
    "f": ("sum", "sum", "sum", "avg", "max", "min"),
    "c": ("sum",),
    "i": ("sum", "sum", "max", "min", "product", "band", "bor", "bxor"),
    "b": ("max", "min", "band", "bor"),
}


def drawn_mesh(random: Random, most: int = MOST_RANKS) -> Mesh:
    """A mesh of 1 to 3 axes of 1 to 4 ranks, sometimes with its ranks out of order."""
    while True:
        sizes = [
            random.choice((1, 2, 2, 2, 3, 3, 4)) for _ in range(random.choice((1, 1, 2, 2, 3)))
        ]
        if math.prod(sizes) <= most:
            break
    names = dict(zip("xyz", sizes))
    if random.random() < 0.85:
        return Mesh(**names)
    ranks = list(range(math.prod(sizes)))
    random.shuffle(ranks)
    return Mesh.from_ranks(torch.tensor(ranks).reshape(sizes), tuple(names))


def drawn_layout(
    random: Random, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, pending: bool = True
) -> Layout:
    """A layout that a tensor may have; one with pending terms only where `pending`."""
    reduce_op = random.choice(REDUCTIONS[kind_of(dtype)])
    for _ in range(20):
        placed = [_placement(random, size, shape, reduce_op, pending) for size in mesh.sizes]
        try:
            layout = Layout(mesh, placed, _order(random, mesh, placed))
            TensorType(shape, dtype, layout)
        except FdtensorError:
            continue
        return layout
    return Layout(mesh, [Replicate()] * mesh.ndim)


def _placement(
    random: Random, size: int, shape: tuple[int, ...], reduce_op: str, pending: bool
) -> Placement:
    kind = random.choices(("R", "S", "strided", "ragged", "P"), (5, 9, 2, 2, 3 * pending))[0]
    if kind == "P":
        return Partial(reduce_op)
    if kind == "R" or not shape:
        return Replicate()
    dim = random.randrange(len(shape))
    match kind:
        case "strided":
            return StridedShard(dim, random.choice((2, 2, 3)))
        case "ragged":
            cuts = sorted(random.randint(0, shape[dim]) for _ in range(size - 1))
            ends = [0, *cuts, shape[dim]]
            return Ragged(dim, tuple(b - a for a, b in itertools.pairwise(ends)))
    return Shard(dim)


def _order(random: Random, mesh: Mesh, placed: list[Placement]) -> Any:
    """The axes that cut each dim, in any order; None for that of the mesh."""
    if random.random() < 0.6:
        return None
    by_dim: dict[int, list[str]] = {}
    for axis, placement in zip(mesh.axes, placed):
        if not isinstance(placement, (Replicate, Partial)):
            by_dim.setdefault(placement.dim, []).append(axis)
    for axes in by_dim.values():
        random.shuffle(axes)
    return tuple((dim, tuple(axes)) for dim, axes in sorted(by_dim.items()) if len(axes) > 1)
