"""Reductions in simpler ops: moments, norms, and where the greatest and least elements are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch

from fdtensor.ops.decompositions.core import decomposition, smooth, summed, wide
from fdtensor.ops.decompositions.scan import in_blocks, placed_along
from fdtensor.ops.notation.dtypes import highest, lowest
from fdtensor.ops.rules.reduce import reduced_dims

aten = torch.ops.aten


def _dropped(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    return x if keepdim or not dims else x.squeeze(tuple(dims))


def _moments(x: torch.Tensor, dim: Any, correction: float | None) -> tuple[Any, Any, list[int]]:
    dims = sorted(reduced_dims(x, dim))
    count = prod(x.shape[d] for d in dims)
    mean = summed(x, dims) / count
    centered = x - mean
    squared = (centered * centered.conj()).real if x.is_complex() else centered * centered
    freedom = max(0.0, count - (1 if correction is None else correction))
    return summed(squared, dims) / freedom, mean, dims


def _spread(x: torch.Tensor, dim: Any, correction: float | None, keepdim: bool, root: bool):
    var, mean, dims = _moments(wide(smooth(x, "var")), dim, correction)
    kind = x.dtype.to_real() if x.is_complex() else x.dtype
    out = _dropped(var.sqrt() if root else var, dims, keepdim).to(kind)
    return out, _dropped(mean, dims, keepdim).to(x.dtype)


@decomposition(aten.var.correction)
def var(x, dim=None, *, correction=None, keepdim=False):
    """`out[i] = sum_j (x[i, j] - mean[i])^2 / (n - correction)`"""
    return _spread(x, dim, correction, keepdim, False)[0]


@decomposition(aten.std.correction)
def std(x, dim=None, *, correction=None, keepdim=False):
    """`out[i] = sqrt(var[i])`"""
    return _spread(x, dim, correction, keepdim, True)[0]


@decomposition(aten.var_mean.correction)
def var_mean(x, dim=None, *, correction=None, keepdim=False):
    """`var[i], mean[i]`"""
    return _spread(x, dim, correction, keepdim, False)


@decomposition(aten.std_mean.correction)
def std_mean(x, dim=None, *, correction=None, keepdim=False):
    """`sqrt(var[i]), mean[i]`"""
    return _spread(x, dim, correction, keepdim, True)


@decomposition(aten.linalg_vector_norm.default)
def vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    """`out[i] = (sum_j |x[i, j]|^ord)^(1 / ord)`"""
    dims = sorted(reduced_dims(x, dim))
    x = x if dtype is None else x.to(dtype)
    size = wide(x) if ord == 2 and not x.is_complex() else wide(x.abs())
    if ord in (inf, -inf):
        over = size if not dims else size.amax(dims, True) if ord > 0 else size.amin(dims, True)
    elif ord == 0:
        over = summed((size != 0).to(size.dtype), dims)
    elif ord == 1:
        over = summed(size, dims)
    elif ord == 2:
        over = summed(size * size, dims).sqrt()
    else:
        over = summed(size.pow(ord), dims).pow(1 / ord)
    kind = x.dtype.to_real() if x.is_complex() else x.dtype
    return _dropped(over, dims, keepdim).to(kind)


@decomposition(aten.renorm.default)
def renorm(x, p, dim, maxnorm):
    """`out[:, i] = x[:, i] * maxnorm / (norm(x[:, i]) + 1e-7)` where the norm is greater"""
    dims = [d for d in range(x.ndim) if d != dim % x.ndim]
    norm = vector_norm(wide(x), p, dims, True) if dims else wide(x).abs()
    scale = torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0)
    return (x * scale).to(x.dtype)


def _where(x: torch.Tensor, most: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """The place in `dims`, in row-major order, of the first element equal to `most` or nan."""
    hit = x == most
    if x.is_floating_point():
        hit = hit | x.isnan()
    place, step = placed_along(x, dims[-1]), x.shape[dims[-1]]
    for d in reversed(dims[:-1]):
        place, step = place + placed_along(x, d, step), step * x.shape[d]
    return torch.where(hit, place, step).amin(dims, True)


Extreme = tuple[Callable, Callable, Callable]
"""How a dim is reduced with its place and without, and what is never the result of a dtype."""

MOST: Extreme = torch.max, torch.amax, lowest
LEAST: Extreme = torch.min, torch.amin, highest


def _extreme(kind: Extreme, blocks: int, x: torch.Tensor, dim: int | None, keepdim: bool):
    if not x.ndim:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    with_place, reduce, fill = kind
    dims = sorted(reduced_dims(x, dim))
    if len(dims) > 1:
        most = reduce(x, dims, True)
        where = _where(x, most, dims)
        return _dropped(most, dims, keepdim), _dropped(where, dims, keepdim)
    d = dims[0]
    parts = in_blocks(x, d, blocks, fill(x.dtype))
    best, place = with_place(parts, d + 1)
    most = reduce(best, [d], True)
    hit = best == most
    if x.is_floating_point():
        hit = hit | best.isnan()
    place = place + placed_along(place, d, parts.shape[d + 1])
    where = torch.where(hit, place, x.shape[d]).amin([d], True)
    return _dropped(most, dims, keepdim), _dropped(where, dims, keepdim)


@decomposition(aten.max.dim, blocked=True)
def max_dim(blocks, x, dim, keepdim=False):
    """`values[i] = max_j x[i, j]`, and the first `j` that has it"""
    return _extreme(MOST, blocks, x, dim, keepdim)


@decomposition(aten.min.dim, blocked=True)
def min_dim(blocks, x, dim, keepdim=False):
    """`values[i] = min_j x[i, j]`, and the first `j` that has it"""
    return _extreme(LEAST, blocks, x, dim, keepdim)


@decomposition(aten.argmax.default, blocked=True)
def argmax(blocks, x, dim=None, keepdim=False):
    """The first `j` with the greatest `x[i, j]`"""
    return _extreme(MOST, blocks, x, dim, keepdim)[1]


@decomposition(aten.argmin.default, blocked=True)
def argmin(blocks, x, dim=None, keepdim=False):
    """The first `j` with the least `x[i, j]`"""
    return _extreme(LEAST, blocks, x, dim, keepdim)[1]
