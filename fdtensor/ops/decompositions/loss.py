"""Likelihood losses in simpler ops, so that the classes may be cut."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fdtensor.ops.decompositions.core import decomposition, wide
from fdtensor.ops.rewrite import CROSS_ENTROPY_BACKWARD

aten = torch.ops.aten

NONE, MEAN = 0, 1
"""The values of `reduction` that are not the sum."""


def _classes(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A vector over the classes along dim 1 of `x[n, c, ...]`, or dim 0 of `x[c]`."""
    dim = min(1, x.ndim - 1)
    return values.reshape([values.shape[0] if d == dim else 1 for d in range(x.ndim)])


@decomposition(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(x, target, weight, reduction, ignore_index):
    """`out = -sum_n w[t[n]] * x[n, t[n]] / total`, over the `n` with `t[n] != ignore_index`"""
    dim = min(1, x.ndim - 1)
    ignored = target == ignore_index
    place = target.masked_fill(ignored, 0).unsqueeze(dim)
    loss = -wide(x).gather(dim, place).squeeze(dim)
    if weight is None:
        total = (~ignored).sum().to(loss.dtype)
    else:
        of_class = _classes(x, wide(weight)).expand(x.shape)
        weights = of_class.gather(dim, place).squeeze(dim).masked_fill(ignored, 0)
        loss, total = loss * weights, weights.sum()
    loss = loss.masked_fill(ignored, 0)  # which may be inf
    if reduction == NONE:  # of a batch the kernel sums no weights then
        return loss.to(x.dtype), total.to(x.dtype) if x.ndim == 1 else x.new_zeros(())
    both = torch.stack([loss.sum(), total])  # in one tensor while they are pending
    out, total = both[0], both[1]
    return (out / total if reduction == MEAN else out).to(x.dtype), total.to(x.dtype)


@decomposition(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(grad, x, target, weight, reduction, ignore_index, total_weight):
    """`dx[n, c] = -grad * w[c] / total` where `c == t[n] != ignore_index`, 0 elsewhere"""
    dim = min(1, x.ndim - 1)
    place = torch.arange(x.shape[dim], device=x.device)
    hit = (_classes(x, place) == target.unsqueeze(dim)) & (target != ignore_index).unsqueeze(dim)
    grad = wide(grad)
    if reduction == NONE:
        grad = grad.unsqueeze(dim)
    elif reduction == MEAN:
        grad = grad / wide(total_weight)
    if weight is not None:
        grad = grad * _classes(x, wide(weight))
    return torch.where(hit, -grad, 0.0).to(x.dtype)


@decomposition(CROSS_ENTROPY_BACKWARD)
def cross_entropy_backward(grad, out, target, weight, reduction, ignore_index, total_weight, dtype):
    """`dx[n, c] = (exp(out[n, c]) - [c == t[n]]) * grad * w[t[n]] / total`, 0 where ignored"""
    ignored = target == ignore_index
    scale = wide(grad)
    if reduction == MEAN:
        scale = scale / wide(total_weight)
    if weight is not None:
        scale = scale * wide(weight)[target.masked_fill(ignored, 0)]
    hit = _classes(out, torch.arange(out.shape[1], device=out.device)) == target.unsqueeze(1)
    scale = torch.where(ignored, 0.0, scale)
    return ((wide(out).exp() - hit.to(scale.dtype)) * scale.unsqueeze(1)).to(dtype)


def _linear_loss(x, matrix, target, bias, weight, ignore_index, reduction="none", smoothing=0.0):
    return F.cross_entropy(
        F.linear(x, matrix, bias),
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=smoothing,
    )


@decomposition("torch_nn._linear_cross_entropy_batch_chunked.default")
def linear_cross_entropy(
    x, matrix, target, bias, weight, reduction, ignore_index, smoothing, size, policy, dtype, again,
    *wanted,
):  # fmt: skip
    """The loss of `x @ matrix.T + bias`, and its gradients in the three of them"""
    smooth = [t for t in (x, matrix, bias) if t is not None]

    def total(x, matrix, *bias):
        args = (*bias, None)[0], weight, ignore_index, reduction, smoothing
        return _linear_loss(x, matrix, target, *args)

    out, back = torch.func.vjp(total, *smooth)[:2]
    parts = (*back(torch.ones_like(out)), None)[:3]  # without a bias it has no gradient
    none = ((0, 0), (0, 0), (0,))
    grads = (g if w else x.new_zeros(n) for g, w, n in zip(parts, wanted, none, strict=True))
    return out, *grads


@decomposition("torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default")
def linear_cross_entropy_of_samples(x, matrix, target, bias, weight, ignore_index, *_):
    """`out[n] = -log_softmax(x[n] @ matrix.T + bias)[t[n]]`"""
    return _linear_loss(x, matrix, target, bias, weight, ignore_index)
