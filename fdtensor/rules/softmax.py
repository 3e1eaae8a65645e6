"""Ops along one dim: a cut of any other dim leaves every slice along it whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fdtensor.graph import Full
from fdtensor.placement import Placement
from fdtensor.rules.core import P, R, S, rule
from fdtensor.rules.reduce import linear_in

aten = torch.ops.aten


def across(x: Full, dim: int) -> Iterator[Placement]:
    """The cuts of the dims of `x` other than `dim`."""
    for d in range(x.ndim):
        if d != dim % x.ndim:
            yield S(d)


@rule(aten._softmax.default, aten._log_softmax.default)
def softmax(x, dim, half_to_float):
    """`out[i, j] = exp(x[i, j]) / sum_k exp(x[i, k])`, or the log of it"""
    for cut in across(x, dim):
        yield (cut,), cut


@rule(aten._safe_softmax.default)
def safe_softmax(x, dim, dtype=None):
    """`out[i, j] = exp(x[i, j]) / sum_k exp(x[i, k])`, 0 where all of `x[i]` is `-inf`"""
    for cut in across(x, dim):
        yield (cut,), cut


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(grad, out, dim, input_dtype):
    """`dx[i, j] = out[i, j] * (grad[i, j] - sum_k grad[i, k] * out[i, k])`

    For the log it is `grad[i, j] - exp(out[i, j]) * sum_k grad[i, k]`.
    """
    for cut in across(grad, dim):
        yield (cut, cut), cut
    yield (P, R), P


@rule(aten.cumsum.default)
def cumsum(x, dim, *, dtype=None):
    """`out[i, j] = sum_(k <= j) x[i, k]`"""
    for cut in across(x, dim):
        yield (cut,), cut
    if linear_in(x, dtype):
        yield (P,), P


@rule(aten.cumprod.default, aten.logcumsumexp.default)
def cumprod(x, dim, *, dtype=None):
    """`out[i, j] = prod_(k <= j) x[i, k]`"""
    for cut in across(x, dim):
        yield (cut,), cut


@rule(aten.cummax.default, aten.cummin.default)
def cummax(x, dim):
    """`values[i, j] = max_(k <= j) x[i, k]`, and where it is"""
    for cut in across(x, dim):
        yield (cut,), (cut, cut)


@rule(aten.sort.default)
def sort(x, dim=-1, descending=False):
    """`values[i, :] = sorted(x[i, :])`, and where they were"""
    for cut in across(x, dim):
        yield (cut,), (cut, cut)


@rule(aten.sort.stable)
def sort_stable(x, *, stable, dim=-1, descending=False):
    """`values[i, :] = sorted(x[i, :])`, equal ones in order, and where they were"""
    for cut in across(x, dim):
        yield (cut,), (cut, cut)


@rule(aten.topk.default)
def topk(x, k, dim=-1, largest=True, sorted=True):
    """`values[i, :k] = sorted(x[i, :])[:k]`, and where they were"""
    for cut in across(x, dim):
        yield (cut,), (cut, cut)


@rule(aten.renorm.default)
def renorm(x, p, dim, maxnorm):
    """`out[:, i] = x[:, i] * min(1, maxnorm / norm(x[:, i]))`"""
    if x.ndim:
        yield (S(dim % x.ndim),), S(dim % x.ndim)
