"""What a rank holds of a dim, as tensors of indices: for the local parts of indexing rules.

A rank looks up, or writes to, just the indices that its block holds: `inside` says which.
"""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.layouts.blocks import Intervals, intersect, length, locate

__all__ = ["inside", "own", "part", "positions", "spare", "spared"]


def inside(index: torch.Tensor, held: Intervals) -> tuple[torch.Tensor, torch.Tensor]:
    """Which entries of `index` are held, and at which position; those that are not come at 0."""
    found, place, passed = torch.zeros_like(index, dtype=torch.bool), torch.zeros_like(index), 0
    for i, (start, stop) in enumerate(held):
        here = (index >= start) & (index < stop)
        shift = start - passed
        place = torch.where(here, index - shift, place)
        found = here if i == 0 else found | here
        passed += stop - start
    return found, place


def own(index: torch.Tensor, held: Intervals) -> torch.Tensor:
    """The position of each entry of `index`; the position after the last for those not held."""
    found, place = inside(index, held)
    return torch.where(found, place, length(held))


def positions(held: Intervals, device: Any = None) -> torch.Tensor:
    """The indices that are held, ascending."""
    parts = [torch.arange(start, stop, device=device) for start, stop in held]
    if not parts:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def part(x: torch.Tensor, dim: int, held: Intervals, wanted: Intervals) -> torch.Tensor:
    """Of a block that holds `held` of `dim`, the indices in `wanted` too."""
    taken = locate(held, intersect(held, wanted))
    if length(taken) == x.shape[dim]:
        return x
    parts = [x.narrow(dim, start, stop - start) for start, stop in taken]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def spared(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor with one more index in `dim`, for what other ranks write."""
    shape = list(x.shape)
    shape[dim] = 1
    return torch.cat([x, x.new_zeros(shape)], dim)


def spare(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor without that index."""
    return x.narrow(dim, 0, x.shape[dim] - 1)
