"""The largest and smallest elements from those of each block, and where they are."""

from __future__ import annotations

import torch

from fdtensor.ops.decompositions.core import decomposition
from fdtensor.ops.decompositions.scan import in_blocks, placed_along
from fdtensor.ops.notation.dtypes import highest, lowest

aten = torch.ops.aten


def _best(x: torch.Tensor, k: int, dim: int, largest: bool, padded: bool):
    """The `k` best along `dim`; padding comes after elements that are equal to it."""
    if not padded:
        return torch.topk(x, k, dim, largest)
    values, at = torch.sort(x, stable=True, dim=dim, descending=largest)
    return values.narrow(dim, 0, k), at.narrow(dim, 0, k)


@decomposition(aten.topk.default, blocked=True)
def topk(blocks, x, k, dim=-1, largest=True, sorted=True):
    """`values[i]` are the best of the best `k` of each block `x[i, b]`, and where they are"""
    if not x.ndim:
        return torch.topk(x, k, dim, largest)
    dim %= x.ndim
    worst = lowest(x.dtype) if largest else highest(x.dtype)
    if not largest and x.is_floating_point():
        worst = torch.nan
    parts = in_blocks(x, dim, blocks, worst)
    size = parts.shape[dim + 1]
    padded = size * blocks > x.shape[dim]
    values, at = _best(parts, min(k, size), dim + 1, largest, padded)
    at = at + placed_along(at, dim, size)
    values, of = _best(values.flatten(dim, dim + 1), k, dim, largest, padded)
    return values, at.flatten(dim, dim + 1).gather(dim, of)
