"""Normalizations in simpler ops, so that the dims that are averaged over may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fdtensor.ops.decompositions.core import decomposition, summed, wide

aten = torch.ops.aten

Tensor = torch.Tensor


def _statistics_dtype(x, weight, bias) -> torch.dtype:
    """The dtype of the statistics of `x` in kernels: on a GPU 32 bits, else the parameters'."""
    if x.device.type != "cpu":
        return torch.float32 if x.dtype.itemsize < 4 else x.dtype
    parameter = weight if weight is not None else bias
    return x.dtype if parameter is None else parameter.dtype


def _statistics(x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, ...]:
    """`x - mean`, and `mean`, `var`, `1 / sqrt(var + eps)` over `dims`, which stay with size 1."""
    count = prod(x.shape[d] for d in dims)
    mean = summed(x, dims) / count
    centered = x - mean
    var = summed(centered * centered, dims) / count
    return centered, mean, var, (var + eps).rsqrt()


def _along(t: Tensor, x: Tensor, dim: int) -> Tensor:
    """The vector `t` along dim `dim` of a tensor like `x`."""
    return wide(t).reshape(*[t.shape[0] if d == dim else 1 for d in range(x.ndim)])


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * wide(weight)
    return x if bias is None else x + wide(bias)


def _sums(grad: Tensor, xhat: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The sums of `grad * xhat` and of `grad` over `dims`, in one tensor while they are pending."""
    both = torch.stack([summed(grad * xhat, dims), summed(grad, dims)])
    return both[0], both[1]


def _through(grad: Tensor, xhat: Tensor, rstd: Tensor, dims: Sequence[int]) -> Tensor:
    """The gradient before a normalization, from that of `xhat = (x - mean) * rstd`."""
    count = prod(grad.shape[d] for d in dims)
    along, level = _sums(grad, xhat, dims)
    return (grad - level / count - xhat * (along / count)) * rstd


def _masked(mask: Sequence[bool], outs: Sequence[Any], dtypes: Sequence[torch.dtype]) -> tuple:
    return tuple([out.to(d) if m else None for m, out, d in zip(mask, outs, dtypes, strict=True)])


@decomposition(aten.native_layer_norm.default)
def layer_norm(x, normalized_shape, weight, bias, eps):
    """`out[i, j] = (x[i, j] - mean[i]) * rstd[i] * weight[j] + bias[j]`"""
    dims = list(range(x.ndim - len(normalized_shape), x.ndim))
    apart, mean, _, rstd = _statistics(wide(x), dims, eps)
    out = _affine(apart * rstd, weight, bias).to(x.dtype)
    kind = _statistics_dtype(x, weight, bias)
    return out, mean.to(kind), rstd.to(kind)


@decomposition(aten.native_layer_norm_backward.default)
def layer_norm_backward(grad, x, normalized_shape, mean, rstd, weight, bias, output_mask):
    """`dx = (dxhat - mean_j(dxhat) - xhat * mean_j(dxhat * xhat)) * rstd`"""
    lead = x.ndim - len(normalized_shape)
    wide_grad, wide_rstd = wide(grad), wide(rstd)
    xhat = (wide(x) - wide(mean)) * wide_rstd
    dxhat = _affine(wide_grad, weight, None)
    dx = _through(dxhat, xhat, wide_rstd, list(range(lead, x.ndim)))
    over = list(range(lead))
    shape = list(normalized_shape)
    dweight = summed(wide_grad * xhat, over).reshape(shape)
    dbias = summed(wide_grad, over).reshape(shape)
    kinds = [t.dtype if t is not None else x.dtype for t in (x, weight, bias)]
    return _masked(output_mask, (dx, dweight, dbias), kinds)


@decomposition(aten._fused_rms_norm.default)
def rms_norm(x, normalized_shape, weight, eps):
    """`out[i, j] = x[i, j] * rstd[i] * weight[j]`"""
    dims = list(range(x.ndim - len(normalized_shape), x.ndim))
    count = prod(normalized_shape)
    eps = torch.finfo(wide(x).dtype).eps if eps is None else eps
    rstd = (summed(wide(x) * wide(x), dims) / count + eps).rsqrt()
    kind = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    return _affine(wide(x) * rstd, weight, None).to(kind), rstd


@decomposition(aten._fused_rms_norm_backward.default)
def rms_norm_backward(grad, x, normalized_shape, rstd, weight, output_mask):
    """`dx = (dxhat - xhat * mean_j(dxhat * xhat)) * rstd`"""
    lead = x.ndim - len(normalized_shape)
    dims, count = list(range(lead, x.ndim)), prod(normalized_shape)
    xhat = wide(x) * wide(rstd)
    dxhat = _affine(wide(grad), weight, None)
    dx = (dxhat - xhat * (summed(dxhat * xhat, dims) / count)) * wide(rstd)
    dweight = summed(wide(grad) * xhat, list(range(lead))).reshape(list(normalized_shape))
    kinds = (x.dtype, x.dtype if weight is None else weight.dtype)
    return _masked(output_mask, (dx, dweight), kinds)


def _trained(x, weight, bias, eps):
    """The output of a batch norm in training, and the mean, variance and `invstd` of the batch."""
    dims = [d for d in range(x.ndim) if d != 1]
    centered, mean, var, invstd = _statistics(wide(x), dims, eps)
    w, b = (t if t is None else _along(t, x, 1) for t in (weight, bias))
    out = _affine(centered * invstd, w, b).to(x.dtype)
    return out, *(t.squeeze(tuple(dims)) if dims else t for t in (mean, var, invstd))


def _running(running, new, momentum):
    return ((1 - momentum) * wide(running) + momentum * new).to(running.dtype)


def _evaluated(x, weight, bias, running_mean, running_var, eps):
    invstd = (wide(running_var) + eps).rsqrt()
    w, b = (t if t is None else _along(t, x, 1) for t in (weight, bias))
    hat = (wide(x) - _along(running_mean, x, 1)) * _along(invstd, x, 1)
    return _affine(hat, w, b).to(x.dtype)


@decomposition(aten._native_batch_norm_legit_functional.default)
def batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """`out, mean, invstd` and the new running statistics; their variance is the unbiased one"""
    if not training:
        out = _evaluated(x, weight, bias, running_mean, running_var, eps)
        return out, x.new_zeros(0), x.new_zeros(0), running_mean, running_var
    out, mean, var, invstd = _trained(x, weight, bias, eps)
    count = x.numel() // x.shape[1]
    new_mean = _running(running_mean, mean, momentum)
    new_var = _running(running_var, var * (count / (count - 1)), momentum)
    kind = _statistics_dtype(x, weight, bias)
    return out, mean.to(kind), invstd.to(kind), new_mean, new_var


@decomposition(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(x, weight, bias, training, momentum, eps):
    """`out, mean, invstd` of the batch"""
    out, mean, _, invstd = _trained(x, weight, bias, eps)
    kind = _statistics_dtype(x, weight, bias)
    return out, mean.to(kind), invstd.to(kind)


@decomposition(aten.native_batch_norm.default)
def batch_norm_native(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """`out, mean, invstd`; the running statistics stay as they are"""
    if training:
        return batch_norm_no_stats(x, weight, bias, training, momentum, eps)
    return batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)[:3]


@decomposition(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(x, weight, bias, running_mean, running_var, momentum, eps):
    """`out, mean, invstd`, an empty reserve and the new running statistics"""
    results = batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return *results[:3], x.new_empty(0, dtype=torch.uint8), *results[3:]


def _batch_backward(grad, x, weight, mean, invstd, training, mask):
    """`dx`, `dweight`, `dbias` of a batch norm with the statistics that it used."""
    dims = [d for d in range(x.ndim) if d != 1]
    rstd = _along(invstd, x, 1)
    xhat = (wide(x) - _along(mean, x, 1)) * rstd
    count = x.numel() // x.shape[1]
    dweight, dbias = _sums(wide(grad), xhat, dims)
    dxhat = wide(grad)
    if training:
        dxhat = dxhat - dbias / count - xhat * (dweight / count)
    dx = _affine(dxhat, None if weight is None else _along(weight, x, 1), None) * rstd
    dweight, dbias = dweight.reshape(x.shape[1]), dbias.reshape(x.shape[1])
    kind = x.dtype if weight is None else weight.dtype
    return _masked(mask, (dx, dweight, dbias), (x.dtype, kind, kind))


@decomposition(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    grad, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
):
    """`dx = (dxhat - mean_n(dxhat) - xhat * mean_n(dxhat * xhat)) * invstd`"""
    mean = save_mean if train else running_mean
    invstd = save_invstd if train else (wide(running_var) + eps).rsqrt()
    return _batch_backward(grad, x, weight, mean, invstd, train, output_mask)


@decomposition(aten.batch_norm_backward.default)
def batch_norm_backward_reserve(
    grad, x, weight, running_mean, running_var, save_mean, save_var, update, eps, mask, reserve
):
    """`batch_norm_backward`, which needs no reserve"""
    return batch_norm_backward(
        grad, x, weight, running_mean, running_var, save_mean, save_var, update, eps, mask
    )


@decomposition(aten.native_group_norm.default)
def group_norm(x, weight, bias, N, C, HxW, group, eps):
    """`out[n, g, c] = (x[n, g, c] - mean[n, g]) * rstd[n, g] * weight[g, c] + bias[g, c]`"""
    grouped = wide(x).reshape(N, group, C // group, *x.shape[2:])
    dims = list(range(2, grouped.ndim))
    centered, mean, _, rstd = _statistics(grouped, dims, eps)
    hat = (centered * rstd).reshape(x.shape)
    w, b = (t if t is None else _along(t, x, 1) for t in (weight, bias))
    kind = _statistics_dtype(x, weight, bias)
    stats = [t.squeeze(tuple(dims)).to(kind) for t in (mean, rstd)]
    return _affine(hat, w, b).to(x.dtype), *stats


@decomposition(aten.native_group_norm_backward.default)
def group_norm_backward(grad, x, mean, rstd, weight, N, C, HxW, group, output_mask):
    """`dx = (dxhat - mean_c(dxhat) - xhat * mean_c(dxhat * xhat)) * rstd`"""
    shape = N, group, C // group, *x.shape[2:]
    spread = [*mean.shape, *[1] * (len(shape) - 2)]
    wide_rstd = wide(rstd).reshape(spread)
    xhat = (wide(x).reshape(shape) - wide(mean).reshape(spread)) * wide_rstd
    dxhat = _affine(wide(grad), None if weight is None else _along(weight, x, 1), None).reshape(
        shape
    )
    dx = _through(dxhat, xhat, wide_rstd, list(range(2, len(shape)))).reshape(x.shape)
    dims = [d for d in range(x.ndim) if d != 1]
    dweight = summed(wide(grad) * xhat.reshape(x.shape), dims).reshape(C)
    dbias = summed(wide(grad), dims).reshape(C)
    kind = x.dtype if weight is None else weight.dtype
    return _masked(output_mask, (dx, dweight, dbias), (x.dtype, kind, kind))
