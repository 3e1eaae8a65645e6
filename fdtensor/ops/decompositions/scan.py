"""Scans in simpler ops: each block by itself, then combined with the totals of those before it."""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.ops.decompositions.core import decomposition, wide
from fdtensor.ops.notation.dtypes import highest, lowest
from fdtensor.ops.rewrite import BACKWARD_SCANS

aten = torch.ops.aten

Tensor = torch.Tensor

__all__ = ["in_blocks", "joined_blocks", "placed_along"]


def in_blocks(x: Tensor, dim: int, blocks: int, fill: float) -> Tensor:
    """`x` with `dim` as two, `(blocks, size)`, and `fill` after its end."""
    size = -(-x.shape[dim] // blocks)
    lack = blocks * size - x.shape[dim]
    if lack:
        x = aten.constant_pad_nd(x, [0, 0] * (x.ndim - 1 - dim) + [0, lack], fill)
    return x.reshape(*x.shape[:dim], blocks, size, *x.shape[dim + 1 :])


def placed_along(x: Tensor, dim: int, step: int = 1) -> Tensor:
    """`0, step, 2 * step, ...` along a dim of a tensor like `x`."""
    n = x.shape[dim]
    at = torch.arange(0, n * step, step, device=x.device)
    return at.reshape([n if d == dim else 1 for d in range(x.ndim)])


def _shifted(t: Tensor, dim: int, by: int, fill: float) -> Tensor:
    """The entry of each block at the place of the next, or of the one before for -1."""
    return aten.constant_pad_nd(t, [0, 0] * (t.ndim - 1 - dim) + [by, -by], fill)


def joined_blocks(x: Tensor, dim: int, size: int) -> Tensor:
    """The blocks in one dim again, without the padding after its end."""
    x = x.flatten(dim, dim + 1)
    return x if x.shape[dim] == size else x.narrow(dim, 0, size)


def _scanned(
    x: Tensor, dim: int, blocks: int, scan, join, fill: float, from_end: bool = False
) -> Tensor:
    if not x.ndim:
        return scan(x, 0)
    dim %= x.ndim
    local = scan(in_blocks(x, dim, blocks, fill), dim + 1)
    last, by = (0, -1) if from_end else (-1, 1)
    others = _shifted(local.narrow(dim + 1, last, 1), dim, by, fill)
    return joined_blocks(join(scan(others, dim), local), dim, x.shape[dim])


def _cast(x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, torch.dtype]:
    """`x` in the dtype in which a scan is computed, and the dtype of its result."""
    whole = not (x.is_floating_point() or x.is_complex())
    kind = dtype or (torch.int64 if whole else x.dtype)
    return wide(x.to(kind)), kind


@decomposition(aten.cumsum.default, blocked=True)
def cumsum(blocks, x, dim, *, dtype=None):
    """`out[b, j] = sum_(k <= j) x[b, k] + sum_(a < b) sum_k x[a, k]`"""
    x, kind = _cast(x, dtype)
    return _scanned(x, dim, blocks, torch.cumsum, torch.add, 0).to(kind)


@decomposition(aten.cumprod.default, blocked=True)
def cumprod(blocks, x, dim, *, dtype=None):
    """`out[b, j] = prod_(k <= j) x[b, k] * prod_(a < b) prod_k x[a, k]`"""
    x, kind = _cast(x, dtype)
    return _scanned(x, dim, blocks, torch.cumprod, torch.mul, 1).to(kind)


@decomposition(aten.logcumsumexp.default, blocked=True)
def logcumsumexp(blocks, x, dim):
    """`out[b, j] = log(sum_(k <= j) exp(x[b, k]) + sum_(a < b) sum_k exp(x[a, k]))`"""
    fill = -torch.inf
    return _scanned(wide(x), dim, blocks, torch.logcumsumexp, torch.logaddexp, fill).to(x.dtype)


def _from_end(scan: Any) -> Any:
    return lambda x, dim: scan(x.flip(dim), dim).flip(dim)


@decomposition(BACKWARD_SCANS[aten.cumsum.default], blocked=True)
def cumsum_from_end(blocks, x, dim):
    """`out[b, j] = sum_(k >= j) x[b, k] + sum_(a > b) sum_k x[a, k]`"""
    scan = _from_end(torch.cumsum)
    x, kind = _cast(x, None)
    return _scanned(x, dim, blocks, scan, torch.add, 0, from_end=True).to(kind)


@decomposition(BACKWARD_SCANS[aten.logcumsumexp.default], blocked=True)
def logcumsumexp_from_end(blocks, x, dim):
    """`out[b, j] = log(sum_(k >= j) exp(x[b, k]) + sum_(a > b) sum_k exp(x[a, k]))`"""
    fill, scan = -torch.inf, _from_end(torch.logcumsumexp)
    return _scanned(wide(x), dim, blocks, scan, torch.logaddexp, fill, from_end=True).to(x.dtype)


def _extreme(blocks: int, x: Tensor, dim: int, scan, reaches, fill: float):
    if not x.ndim:
        return scan(x, 0)
    dim, n = dim % x.ndim, x.shape[dim]
    values, at = scan(in_blocks(x, dim, blocks, fill), dim + 1)
    at = at + placed_along(values, dim, values.shape[dim + 1])
    ends = _shifted(values.narrow(dim + 1, -1, 1), dim, 1, fill)
    before, of = scan(ends, dim)
    place = _shifted(at.narrow(dim + 1, -1, 1), dim, 1, 0).gather(dim, of)
    own = reaches(values, before)  # among equals the last
    if x.is_floating_point():
        own = values.isnan() | (own & ~before.isnan())
    values, at = torch.where(own, values, before), torch.where(own, at, place)
    return joined_blocks(values, dim, n), joined_blocks(at, dim, n)


@decomposition(aten.cummax.default, blocked=True)
def cummax(blocks, x, dim):
    """`values[i, j] = max_(k <= j) x[i, k]`, and the last `k` that has it"""
    return _extreme(blocks, x, dim, torch.cummax, torch.ge, lowest(x.dtype))


@decomposition(aten.cummin.default, blocked=True)
def cummin(blocks, x, dim):
    """`values[i, j] = min_(k <= j) x[i, k]`, and the last `k` that has it"""
    return _extreme(blocks, x, dim, torch.cummin, torch.le, highest(x.dtype))
