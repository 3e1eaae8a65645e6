"""Indices of a dim that a rank holds a part of, as positions in its block.

For local computations of indexing ops: a rank reads, or writes to, only the indices that its block
holds, which `inside` finds.
"""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.layouts.blocks import Intervals, intersect, length, locate

__all__ = ["inside", "local_index", "positions", "subset", "with_scratch", "without_scratch"]


def inside(index: torch.Tensor, held: Intervals) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each entry of `index` is held, and its position in the block, 0 where it is not."""
    is_held, position, passed = (
        torch.zeros_like(index, dtype=torch.bool),
        torch.zeros_like(index),
        0,
    )
    for i, (start, stop) in enumerate(held):
        in_interval = (index >= start) & (index < stop)
        shift = start - passed
        position = torch.where(in_interval, index - shift, position)
        is_held = in_interval if i == 0 else is_held | in_interval
        passed += stop - start
    return is_held, position


def local_index(index: torch.Tensor, held: Intervals) -> torch.Tensor:
    """The position of each entry of `index` in the block; one after the last for those not held."""
    is_held, position = inside(index, held)
    return torch.where(is_held, position, length(held))


def positions(held: Intervals, device: Any = None) -> torch.Tensor:
    """The indices that are held, ascending."""
    parts = [torch.arange(start, stop, device=device) for start, stop in held]
    if not parts:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def subset(x: torch.Tensor, dim: int, held: Intervals, wanted: Intervals) -> torch.Tensor:
    """The part of a block, which holds `held` of `dim`, whose indices are in `wanted` too."""
    taken = locate(held, intersect(held, wanted))
    if length(taken) == x.shape[dim]:
        return x
    parts = [x.narrow(dim, start, stop - start) for start, stop in taken]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def with_scratch(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor with one more index in `dim`, to which writes go that belong to other ranks."""
    shape = list(x.shape)
    shape[dim] = 1
    return torch.cat([x, x.new_zeros(shape)], dim)


def without_scratch(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor without the index that `with_scratch` added."""
    return x.narrow(dim, 0, x.shape[dim] - 1)
