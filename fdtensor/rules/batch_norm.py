"""Batch norms: channels are independent; with given statistics every element is."""

from __future__ import annotations

import torch

from fdtensor.rules.core import P, R, S, rule
from fdtensor.rules.norm import given, masked, or_empty, statistics_dtype

aten = torch.ops.aten


def _native(x, weight, bias, *_):
    stats = statistics_dtype(x, weight, bias)
    return x.dtype, stats, stats, torch.uint8


def _functional(x, weight, bias, running_mean, running_var, *_):
    return *_native(x, weight, bias)[:3], running_mean, running_var


def _with_update(x, weight, bias, running_mean, running_var, *_):
    return *_native(x, weight, bias), running_mean, running_var


def _backward_kinds(grad, x, weight, *rest):
    mask = next(r for r in rest if isinstance(r, list))
    kind = x.dtype if weight is None else weight.dtype
    return masked(mask, (x.dtype, kind, kind))


def _cudnn_kinds(x, grad, weight, *_):
    return x.dtype, weight.dtype, weight.dtype


def _batch_norm(x, others, training: bool, outs: int):
    """Channels are independent; with given statistics every element is."""
    yield (S(1), *given(*((t, S(0)) for t in others))), (S(1), *[S(0)] * (outs - 1))
    if not training:
        for d in range(x.ndim):
            if d != 1:
                yield (S(d), *given(*((t, R) for t in others))), (S(d), *[R] * (outs - 1))


@rule(aten.native_batch_norm.default, local=or_empty(aten.native_batch_norm.default, _native))
def batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """`out[n, c] = (x[n, c] - mean_n x[n, c]) * invstd[c] * weight[c] + bias[c]`"""
    yield from _batch_norm(x, (weight, bias, running_mean, running_var), training, 3)


@rule(
    aten._native_batch_norm_legit_functional.default,
    local=or_empty(aten._native_batch_norm_legit_functional.default, _functional),
)
def batch_norm_functional(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """`batch_norm` with the new running statistics"""
    yield from _batch_norm(x, (weight, bias, running_mean, running_var), training, 5)


@rule(
    aten._native_batch_norm_legit.no_stats,
    local=or_empty(aten._native_batch_norm_legit.no_stats, _native),
)
def batch_norm_no_stats(x, weight, bias, training, momentum, eps):
    """`batch_norm` without running statistics"""
    yield from _batch_norm(x, (weight, bias), True, 3)


@rule(
    aten._batch_norm_with_update_functional.default,
    local=or_empty(aten._batch_norm_with_update_functional.default, _with_update),
)
def batch_norm_with_update(x, weight, bias, running_mean, running_var, momentum, eps):
    """`batch_norm` in training, with its empty reserve and the new running statistics"""
    yield from _batch_norm(x, (weight, bias, running_mean, running_var), True, 6)


@rule(
    aten._batch_norm_no_update.default, local=or_empty(aten._batch_norm_no_update.default, _native)
)
def batch_norm_no_update(x, weight, bias, running_mean, running_var, momentum, eps):
    """`batch_norm` in evaluation, with its empty reserve"""
    training = running_mean is None
    yield from _batch_norm(x, (weight, bias, running_mean, running_var), training, 4)


@rule(aten.cudnn_batch_norm.default, local=or_empty(aten.cudnn_batch_norm.default, _native))
def cudnn_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """`batch_norm` with its reserve"""
    yield from _batch_norm(x, (weight, bias, running_mean, running_var), training, 4)


def _batch_norm_backward(x, others, training: bool, mask, reserve=None):
    """Channels are independent; with given statistics the sums over the batch are pending."""

    def stored(placed):
        return given(*((t, placed) for t in others))

    tail = given((reserve, S(0)))
    yield (S(1), S(1), *stored(S(0)), *tail), masked(mask, (S(1), S(0), S(0)))
    tail = given((reserve, R))
    if not training:
        for d in range(x.ndim):
            if d != 1:
                yield (S(d), S(d), *stored(R), *tail), masked(mask, (S(d), P, P))


@rule(
    aten.native_batch_norm_backward.default,
    local=or_empty(aten.native_batch_norm_backward.default, _backward_kinds),
)
def batch_norm_backward(
    grad, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
):
    """`dbias[c] = sum_n grad[n, c], dweight[c] = sum_n grad[n, c] * xhat[n, c]`"""
    stored = (weight, running_mean, running_var, save_mean, save_invstd)
    yield from _batch_norm_backward(x, stored, train, output_mask)
    yield (P, R, *given(*((t, R) for t in stored))), masked(output_mask, (P, P, P))


@rule(
    aten.batch_norm_backward.default,
    local=or_empty(aten.batch_norm_backward.default, _backward_kinds),
)
def batch_norm_backward_reserve(
    grad, x, weight, running_mean, running_var, save_mean, save_var, update, eps, mask, reserve
):
    """`batch_norm_backward` with the reserve of the forward"""
    stored = (weight, running_mean, running_var, save_mean, save_var)
    yield from _batch_norm_backward(x, stored, update, mask, reserve)
    yield (P, R, *given(*((t, R) for t in stored)), R), masked(mask, (P, P, P))


@rule(
    aten.cudnn_batch_norm_backward.default,
    local=or_empty(aten.cudnn_batch_norm_backward.default, _cudnn_kinds),
)
def cudnn_batch_norm_backward(
    x, grad, weight, running_mean, running_var, save_mean, save_var, eps, reserve
):
    """`batch_norm_backward` of training, with the reserve of the forward"""
    stored = (weight, running_mean, running_var, save_mean, save_var)
    yield from _batch_norm_backward(x, stored, True, (True,) * 3, reserve)
    yield (R, P, *given(*((t, R) for t in stored)), R), (P, P, P)
