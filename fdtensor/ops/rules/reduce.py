"""Reductions: a cut of a reduced dim leaves a reduction pending.

Where no pending placement is right, a cut of a dim that is not reduced leaves every slice whole.

    sum, mean            `out[i] = sum_j x[i, j]`, and that over `n_j`
    nansum               the same, with 0 for nan
    count_nonzero        `out[i] = sum_j (x[i, j] != 0)`
    prod                 `out[i] = prod_j x[i, j]`
    amax, amin, aminmax  `out[i] = max_j x[i, j]`, or the least, or both
    any, all             `out[i] = or_j x[i, j]`, or `and`
    linalg_vector_norm   `out[i] = (sum_j |x[i, j]|^ord)^(1 / ord)`
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

from fdtensor.layouts.placement import Placement
from fdtensor.layouts.torch_private import schema_of
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import MAX, MIN, PRODUCT, P, S, rule
from fdtensor.ops.notation.dtypes import highest, linear_in, lowest
from fdtensor.ops.notation.each import each
from fdtensor.ops.notation.ops import overloads

aten = torch.ops.aten


def reduced_dims(x: Full | torch.Tensor, dims: Sequence[int] | int | None) -> set[int]:
    """The dims that a reduction reduces; all of them for None or an empty list."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return set(range(x.ndim))
    named = [dims] if isinstance(dims, int) else dims
    return {d % x.ndim for d in named} if x.ndim else set()


def reductions(x: Full, dims, keepdim: bool, *pending: Placement | None):
    """Any cut: of a dim that is not reduced it stays, of a reduced one each output is pending.

    Where a pending placement is None, no reduced dim is cut.
    """
    gone = reduced_dims(x, dims)
    for d in range(x.ndim):
        if d not in gone:
            yield (S(d),), (S(d if keepdim else d - sum(g < d for g in gone)),) * len(pending)
        elif None not in pending:
            yield (S(d),), pending


def _mean(at, x, dim=None, keepdim=False, *, dtype=None):
    dims = sorted(reduced_dims(x, dim))
    dtype = dtype or x.dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    added = x.sum(dims, keepdim, dtype=wide) if dims else x.to(wide)
    return (added / prod(at.ins[0].full[d] for d in dims)).to(dtype)


def _or(op, nothing):
    """`op`, but on empty blocks, for which kernels may have no value, `nothing` of a dtype."""

    def local(at, x, *args, **kwargs):
        if x.numel():
            return op(x, *args, **kwargs)
        return [
            x.new_full(out.shape, of(x.dtype)) for of, out in zip(nothing, at.outs, strict=True)
        ]

    return local


def _never(*_):
    return False


def _always(*_):
    return True


def _of_bools(x, dtype):
    return x.dtype == torch.bool


def _multiplies(x, dtype):
    return x.dtype == torch.bool or linear_in(x, dtype)


def _reduction(names, *pending, passes=_never, nothing=(), local=None):
    """The rules of ops that leave these placements pending; where it `passes`, operands may be too.

    With `nothing`, kernels refuse empty blocks.
    """

    def rows(op, named):
        x, dim = named["self"], named.get("dim")
        outs = pending or [None] * len(schema_of(op).returns)
        if dim == () and op in (aten.any.dims, aten.all.dims):  # here it reduces nothing
            yield from (((S(d),), S(d)) for d in range(x.ndim))
        else:
            yield from reductions(x, dim, named.get("keepdim", False), *outs)
        if passes(x, named.get("dtype")):
            yield pending, pending

    for op in overloads(names):
        each(op, local=_or(op, nothing) if nothing else local)(rows)


WHOLE = """
max.dim min.dim argmax argmin median median.dim nanmedian nanmedian.dim mode kthvalue logsumexp
var.correction std.correction var_mean.correction std_mean.correction
"""

_reduction(WHOLE)
_reduction("sum sum.dim_IntList", P, passes=linear_in)
_reduction("mean mean.dim", P, passes=linear_in, local=_mean)
_reduction("nansum count_nonzero count_nonzero.dim_IntList", P)
_reduction("prod prod.dim_int", PRODUCT, passes=_multiplies)
_reduction("amax max", MAX, passes=_always, nothing=(lowest,))
_reduction("amin min", MIN, passes=_always, nothing=(highest,))
_reduction("aminmax", MIN, MAX, nothing=(highest, lowest))
_reduction("any any.dim any.dims", MAX, passes=_of_bools)
_reduction("all all.dim all.dims", MIN, passes=_of_bools)


_NORMS = {0: P, 1: P, inf: MAX, -inf: MIN}
"""The orders whose norm is a reduction of the norms of blocks."""


def _vector_norm(at, x, ord=2, dim=None, keepdim=False, *, dtype=None):
    if x.numel() or 0 <= ord < inf:
        return aten.linalg_vector_norm(x, ord, dim, keepdim, dtype=dtype)
    kind = (dtype or x.dtype).to_real()
    return x.new_full(at.outs[0].shape, 0.0 if ord > 0 else inf, dtype=kind)


@rule(aten.linalg_vector_norm.default, local=_vector_norm)
def vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    """`out[i] = (sum_j |x[i, j]|^ord)^(1 / ord)`"""
    yield from reductions(x, dim, keepdim, _NORMS.get(ord))
