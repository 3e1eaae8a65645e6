"""Reductions: a cut of a reduced dim leaves a reduction pending.

Where none would do, a cut of a dim that is not reduced leaves every slice whole:

    max.dim, min.dim     `values[i] = x[i, at[i]], at[i] = argmax_j x[i, j]`
    median, kthvalue     `values[i] = sorted(x[i, :])[k]`, and where it was
    mode                 `values[i]` is the most frequent of `x[i, :]`, and where it is
    argmax, argmin       `at[i] = argmax_j x[i, j]`
    var, std             `out[i] = sum_j (x[i, j] - mean[i])^2 / (n_j - correction)`, or its root
    var_mean, std_mean   `var[i], mean[i]`
    logsumexp            `out[i] = log sum_j exp(x[i, j])`
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import torch

from fdtensor.graph import Full
from fdtensor.notation.core import P, S, rule
from fdtensor.notation.each import each
from fdtensor.placement import Partial, Placement

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


def reductions(x: Full, dims, keepdim: bool, *pending: Placement | None):
    """Any cut: of a dim that is not reduced it stays, of a reduced one each output is pending.

    There are none of reduced dims where what is pending would be None.
    """
    gone = reduced_dims(x, dims)
    for d in range(x.ndim):
        if d not in gone:
            yield (S(d),), (S(d if keepdim else d - sum(g < d for g in gone)),) * len(pending)
        elif None not in pending:
            yield (S(d),), pending


def linear_in(x: Full, dtype: torch.dtype | None) -> bool:
    """Whether a sum of terms may wait until after a cast to `dtype`: a sum of bools is their or."""
    if x.dtype == torch.bool:
        return False
    return dtype is None or dtype.is_floating_point or dtype.is_complex or dtype == x.dtype


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


@each(
    *(aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default),
    *(aten.median.default, aten.nanmedian.default, aten.median.dim, aten.nanmedian.dim),
    *(aten.mode.default, aten.kthvalue.default, aten.logsumexp.default),
    *(aten.var.correction, aten.std.correction),
    *(aten.var_mean.correction, aten.std_mean.correction),
)
def whole_slices(op, given):
    """A cut of a dim that is not reduced."""
    outs = [None] * len(op._schema.returns)
    yield from reductions(given["self"], given.get("dim"), given.get("keepdim", False), *outs)


@rule(aten.sum.default, aten.sum.dim_IntList)
def total(x, dim=None, keepdim=False, *, dtype=None):
    """`out[i] = sum_j x[i, j]`"""
    yield from reductions(x, dim, keepdim, P)
    if linear_in(x, dtype):
        yield (P,), P


@each(aten.nansum.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def counted(op, given):
    """`out[i] = sum_j f(x[i, j])`, with a 0 for what is nan, or a 1 for what is not 0"""
    yield from reductions(given["self"], given.get("dim"), given.get("keepdim", False), P)


def _mean(at, x, dim=None, keepdim=False, *, dtype=None):
    dims = sorted(reduced_dims(x, dim))
    dtype = dtype or x.dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    added = x.sum(dims, keepdim, dtype=wide) if dims else x.to(wide)
    return (added / prod(at.ins[0].full[d] for d in dims)).to(dtype)


@rule(aten.mean.default, aten.mean.dim, local=_mean)
def mean(x, dim=None, keepdim=False, *, dtype=None):
    """`out[i] = sum_j x[i, j] / n_j`"""
    yield from total(x, dim, keepdim, dtype=dtype)


def _or(op, nothing):
    """`op`, but on empty blocks, for which kernels may know no value: `nothing` of a dtype."""

    def local(at, x, dim=(), keepdim=False):
        return op(x, dim, keepdim) if x.numel() else x.new_full(at.outs[0].shape, nothing(x.dtype))

    return local


@rule(aten.amax.default, aten.max.default, local=_or(aten.amax.default, lowest))
def amax(x, dim=(), keepdim=False):
    """`out[i] = max_j x[i, j]`"""
    yield from reductions(x, dim, keepdim, MAX)
    yield (MAX,), MAX


@rule(aten.amin.default, aten.min.default, local=_or(aten.amin.default, highest))
def amin(x, dim=(), keepdim=False):
    """`out[i] = min_j x[i, j]`"""
    yield from reductions(x, dim, keepdim, MIN)
    yield (MIN,), MIN


def _aminmax(at, x, *, dim=None, keepdim=False):
    if x.numel():
        return aten.aminmax.default(x, dim=dim, keepdim=keepdim)
    nothing = highest(x.dtype), lowest(x.dtype)
    return [x.new_full(out.shape, value) for out, value in zip(at.outs, nothing)]


@rule(aten.aminmax.default, local=_aminmax)
def aminmax(x, *, dim=None, keepdim=False):
    """`low[i] = min_j x[i, j], high[i] = max_j x[i, j]`"""
    yield from reductions(x, dim, keepdim, MIN, MAX)


@rule(aten.prod.default, aten.prod.dim_int)
def product(x, dim=None, keepdim=False, *, dtype=None):
    """`out[i] = prod_j x[i, j]`"""
    yield from reductions(x, dim, keepdim, PRODUCT)
    if x.dtype == torch.bool or linear_in(x, dtype):
        yield (PRODUCT,), PRODUCT


@rule(aten.any.default, aten.any.dim, aten.any.dims)
def some(x, dim=None, keepdim=False, pending=MAX):
    """`out[i] = or_j x[i, j]`"""
    if isinstance(dim, tuple) and not dim:  # here an empty list reduces nothing
        yield from (((S(d),), S(d)) for d in range(x.ndim))
    else:
        yield from reductions(x, dim, keepdim, pending)
    if x.dtype == torch.bool:
        yield (pending,), pending


@rule(aten.all.default, aten.all.dim, aten.all.dims)
def every(x, dim=None, keepdim=False):
    """`out[i] = and_j x[i, j]`"""
    yield from some(x, dim, keepdim, MIN)


_NORMS = {0: P, 1: P, inf: MAX, -inf: MIN}
"""The orders whose norm is a reduction of the norms of blocks."""


def _vector_norm(at, x, ord=2, dim=None, keepdim=False, *, dtype=None):
    if x.numel() or ord not in (inf, -inf):
        return aten.linalg_vector_norm(x, ord, dim, keepdim, dtype=dtype)
    kind = (dtype or x.dtype).to_real()
    return x.new_full(at.outs[0].shape, 0.0 if ord > 0 else inf, dtype=kind)


@rule(aten.linalg_vector_norm.default, local=_vector_norm)
def vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    """`out[i] = (sum_j |x[i, j]|^ord)^(1 / ord)`"""
    yield from reductions(x, dim, keepdim, _NORMS.get(ord))
