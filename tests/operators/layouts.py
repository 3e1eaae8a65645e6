"""`combinations`: layouts for the tensors of a sample, all of them or a fair choice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch

from fdtensor.layouts.dtypes import reducible
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Placement, Replicate, Shard

__all__ = ["LINE", "SQUARE", "combinations", "single"]

LINE = Mesh(x=4)
SQUARE = Mesh(x=2, y=2)


def placements(tensor: torch.Tensor) -> list[Placement]:
    """Those that one axis may have."""
    found: list[Placement] = [Replicate(), *map(Shard, range(tensor.ndim))]
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        found += [Partial(op) for op in ("sum", "avg", "max", "min") if reducible(tensor.dtype, op)]
    elif tensor.dtype is not torch.bool:
        found.append(Partial("sum"))
    return found


def layouts(tensor: torch.Tensor, mesh: Mesh) -> list[Layout]:
    """Those that a tensor may have; reductions of different kinds do not mix."""
    found = []
    for each in itertools.product(placements(tensor), repeat=mesh.ndim):
        if len({p for p in each if isinstance(p, Partial)}) <= 1:
            found.append(Layout(mesh, each))
    return found


def single(tensors: Sequence[torch.Tensor], mesh: Mesh = LINE) -> list[tuple[Layout, ...]]:
    """Each layout of each tensor, with the others replicated."""
    whole = mesh.layout()
    found = [tuple(whole for _ in tensors)]
    for i, tensor in enumerate(tensors):
        for layout in layouts(tensor, mesh)[1:]:
            found.append(tuple(layout if i == j else whole for j in range(len(tensors))))
    return found


def combinations(
    tensors: Sequence[torch.Tensor], mesh: Mesh, most: int, seed: object
) -> list[tuple[Layout, ...]]:
    """At most so many combinations of layouts: all, or those of one tensor and a random choice."""
    each = [layouts(t, mesh) for t in tensors]
    count = 1
    for options in each:
        count *= len(options)
    if count <= most:
        return list(itertools.product(*each))
    draw = random.Random(str(seed))
    found: dict[tuple[Layout, ...], None] = {}
    if mesh.ndim == 1:
        ones = single(tensors, mesh)
        found.update(dict.fromkeys(draw.sample(ones, min(len(ones), most // 2))))
    while len(found) < most:
        found[tuple(draw.choice(options) for options in each)] = None
    return list(found)
