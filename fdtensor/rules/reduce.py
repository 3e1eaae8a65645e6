"""Reductions: a cut of a reduced dim leaves a reduction pending."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, prod

import torch

from fdtensor.graph import Full
from fdtensor.placement import Partial, Placement
from fdtensor.rules.core import P, S, rule

aten = torch.ops.aten

MAX = Partial("max")
MIN = Partial("min")
PRODUCT = Partial("product")


def reduced_dims(x: Full | torch.Tensor, dims: Sequence[int] | int | None) -> set[int]:
    """The dims that a reduction reduces; all of them for None or an empty list."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return set(range(x.ndim))
    named = [dims] if isinstance(dims, int) else dims
    return {d % x.ndim for d in named} if x.ndim else set()


def kept(x: Full, gone: set[int], keepdim: bool) -> Iterator[tuple[Placement, Placement]]:
    """A cut of a dim that is not reduced cuts it in the output."""
    for d in range(x.ndim):
        if d not in gone:
            yield S(d), S(d if keepdim else d - sum(g < d for g in gone))


def reductions(x: Full, dims, keepdim: bool, pending: Placement):
    """Any cut: of a dim that is not reduced it stays, of a reduced one it becomes `pending`."""
    gone = reduced_dims(x, dims)
    for before, after in kept(x, gone, keepdim):
        yield (before,), after
    for d in sorted(gone):
        yield (S(d),), pending


def linear_in(x: Full, dtype: torch.dtype | None) -> bool:
    """Whether a sum of terms may wait until after a cast to `dtype`: a sum of bools is their or."""
    if x.dtype == torch.bool:
        return False
    return dtype is None or dtype.is_floating_point or dtype.is_complex or dtype == x.dtype


def empties(x: torch.Tensor, dims, keepdim: bool, value) -> torch.Tensor | None:
    """The reduction of an empty block: `value`, which kernels may not know; None for others."""
    if x.numel():
        return None
    gone = reduced_dims(x, dims)
    held = [1 if d in gone else n for d, n in enumerate(x.shape) if keepdim or d not in gone]
    return x.new_full(held, value)


def lowest(dtype: torch.dtype) -> float | int | bool:
    """What a maximum over nothing is: the least value of a dtype."""
    if dtype.is_floating_point:
        return -inf
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float | int | bool:
    """What a minimum over nothing is: the greatest value of a dtype."""
    if dtype.is_floating_point:
        return inf
    return True if dtype == torch.bool else torch.iinfo(dtype).max


@rule(aten.sum.default, aten.sum.dim_IntList)
def total(x, dim=None, keepdim=False, *, dtype=None):
    """`out[i] = sum_j x[i, j]`"""
    yield from reductions(x, dim, keepdim, P)
    if linear_in(x, dtype):
        yield (P,), P


@rule(aten.nansum.default)
def nansum(x, dim=None, keepdim=False, *, dtype=None):
    """`out[i] = sum_j (0 if isnan(x[i, j]) else x[i, j])`"""
    yield from reductions(x, dim, keepdim, P)


def _mean(at, x, dim=None, keepdim=False, *, dtype=None):
    full = at.ins[0].full
    dims = sorted(reduced_dims(x, dim))
    dtype = dtype or x.dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    added = x.sum(dims, keepdim, dtype=wide) if dims else x.to(wide)
    return (added / prod(full[d] for d in dims)).to(dtype)


@rule(aten.mean.default, aten.mean.dim, local=_mean)
def mean(x, dim=None, keepdim=False, *, dtype=None):
    """`out[i] = sum_j x[i, j] / n_j`"""
    yield from reductions(x, dim, keepdim, P)
    if linear_in(x, dtype):
        yield (P,), P


def _amax(at, x, dim=(), keepdim=False):
    none = empties(x, dim, keepdim, lowest(x.dtype))
    return aten.amax(x, dim, keepdim) if none is None else none


def _amin(at, x, dim=(), keepdim=False):
    none = empties(x, dim, keepdim, highest(x.dtype))
    return aten.amin(x, dim, keepdim) if none is None else none


@rule(aten.amax.default, aten.max.default, local=_amax)
def amax(x, dim=(), keepdim=False):
    """`out[i] = max_j x[i, j]`"""
    yield from reductions(x, dim, keepdim, MAX)
    yield (MAX,), MAX


@rule(aten.amin.default, aten.min.default, local=_amin)
def amin(x, dim=(), keepdim=False):
    """`out[i] = min_j x[i, j]`"""
    yield from reductions(x, dim, keepdim, MIN)
    yield (MIN,), MIN


def _aminmax(at, x, *, dim=None, keepdim=False):
    dims = () if dim is None else (dim,)
    return _amin(at, x, dims, keepdim), _amax(at, x, dims, keepdim)


@rule(aten.aminmax.default, local=_aminmax)
def aminmax(x, *, dim=None, keepdim=False):
    """`low[i] = min_j x[i, j], high[i] = max_j x[i, j]`"""
    gone = reduced_dims(x, dim)
    for before, after in kept(x, gone, keepdim):
        yield (before,), (after, after)
    for d in gone:
        yield (S(d),), (MIN, MAX)


@rule(
    aten.max.dim,
    aten.min.dim,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.mode.default,
)
def extreme(x, dim=-1, keepdim=False):
    """`values[i] = x[i, at[i]], at[i] = argmax_j x[i, j]`"""
    for before, after in kept(x, reduced_dims(x, dim), keepdim):
        yield (before,), (after, after)


@rule(aten.kthvalue.default)
def kthvalue(x, k, dim=-1, keepdim=False):
    """`values[i] = sorted(x[i, :])[k - 1]`, and where it was"""
    for before, after in kept(x, reduced_dims(x, dim), keepdim):
        yield (before,), (after, after)


@rule(aten.argmax.default, aten.argmin.default)
def argmax(x, dim=None, keepdim=False):
    """`at[i] = argmax_j x[i, j]`"""
    for before, after in kept(x, reduced_dims(x, dim), keepdim):
        yield (before,), after


@rule(aten.prod.default, aten.prod.dim_int)
def product(x, dim=None, keepdim=False, *, dtype=None):
    """`out[i] = prod_j x[i, j]`"""
    yield from reductions(x, dim, keepdim, PRODUCT)
    if x.dtype == torch.bool or linear_in(x, dtype):
        yield (PRODUCT,), PRODUCT


@rule(aten.any.default, aten.any.dim, aten.any.dims)
def some(x, dim=None, keepdim=False):
    """`out[i] = or_j x[i, j]`"""
    yield from _logical(x, dim, keepdim, MAX)


@rule(aten.all.default, aten.all.dim, aten.all.dims)
def every(x, dim=None, keepdim=False):
    """`out[i] = and_j x[i, j]`"""
    yield from _logical(x, dim, keepdim, MIN)


def _logical(x, dim, keepdim, pending):
    if isinstance(dim, tuple) and not dim:  # for these two an empty list reduces nothing
        for d in range(x.ndim):
            yield (S(d),), S(d)
    else:
        yield from reductions(x, dim, keepdim, pending)
    if x.dtype == torch.bool:
        yield (pending,), pending


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(x, dim=None):
    """`out[i] = sum_j (x[i, j] != 0)`"""
    yield from reductions(x, dim, False, P)


@rule(aten.var.correction, aten.std.correction)
def var(x, dim=None, *, correction=None, keepdim=False):
    """`out[i] = sum_j (x[i, j] - mean_j x[i, j])^2 / (n_j - correction)`"""
    for before, after in kept(x, reduced_dims(x, dim), keepdim):
        yield (before,), after


@rule(aten.var_mean.correction, aten.std_mean.correction)
def var_mean(x, dim=None, *, correction=None, keepdim=False):
    """`mean[i] = sum_j x[i, j] / n_j, var[i] = sum_j (x[i, j] - mean[i])^2 / (n_j - correction)`"""
    for before, after in kept(x, reduced_dims(x, dim), keepdim):
        yield (before,), (after, after)


def _vector_norm(at, x, ord=2, dim=None, keepdim=False, *, dtype=None):
    none = None
    if ord in (inf, -inf):
        none = empties(x.abs(), dim, keepdim, 0.0 if ord > 0 else inf)
    if none is None:
        return aten.linalg_vector_norm(x, ord, dim, keepdim, dtype=dtype)
    return none.to(dtype.to_real()) if dtype is not None else none


_NORMS = {0: P, 1: P, inf: MAX, -inf: MIN}
"""The orders whose norm is a reduction of the norms of blocks."""


@rule(aten.linalg_vector_norm.default, local=_vector_norm)
def vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    """`out[i] = (sum_j |x[i, j]|^ord)^(1 / ord)`"""
    if ord in _NORMS:
        yield from reductions(x, dim, keepdim, _NORMS[ord])
    else:
        for before, after in kept(x, reduced_dims(x, dim), keepdim):
            yield (before,), after


@rule(aten.logsumexp.default)
def logsumexp(x, dim, keepdim=False):
    """`out[i] = log sum_j exp(x[i, j])`"""
    for before, after in kept(x, reduced_dims(x, dim), keepdim):
        yield (before,), after
