"""The likelihood loss in simpler ops, so that the classes may be cut."""

from __future__ import annotations

import torch

from fdtensor.decompositions.core import decomposition, wide

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
