"""Softmax and its kin in simpler ops, so that the dim along which they normalize may be cut."""

from __future__ import annotations

from math import inf

import torch

from fdtensor.ops.decompositions.core import decomposition, smooth, summed, wide
from fdtensor.ops.rules.reduce import reduced_dims

aten = torch.ops.aten


@decomposition(aten.logsumexp.default)
def logsumexp(x, dim, keepdim=False):
    """`out[i] = log sum_j exp(x[i, j] - most[i]) + most[i]`"""
    dims = sorted(reduced_dims(x, dim))
    known = x.is_floating_point() or x.is_complex()
    kind = x.dtype if known else torch.get_default_dtype()
    x = wide(x.to(kind))
    real = x.real if x.is_complex() else x
    most = real.amax(dims, True) if dims else real
    most = most.masked_fill(most.abs() == inf, 0)
    out = summed((x - most).exp(), dims).log() + most
    return (out if keepdim or not dims else out.squeeze(tuple(dims))).to(kind)


def _below_most(x: torch.Tensor, dim: int) -> torch.Tensor:
    x = wide(smooth(x, "softmax"))
    return x - (x.amax(dim, True) if x.ndim else x)


@decomposition(aten._softmax.default)
def softmax(x, dim, half_to_float):
    """`out[i, j] = exp(x[i, j] - most[i]) / sum_k exp(x[i, k] - most[i])`"""
    e = _below_most(x, dim).exp()
    return (e / summed(e, [dim] if x.ndim else [])).to(torch.float32 if half_to_float else x.dtype)


@decomposition(aten._safe_softmax.default)
def safe_softmax(x, dim, dtype=None):
    """`softmax`, 0 where all of `x[i]` is `-inf`"""
    x = x if dtype is None else x.to(dtype)
    none = x == -inf
    none = none.all(dim, True) if x.ndim else none
    return softmax(x, dim, False).masked_fill(none, 0)


@decomposition(aten._log_softmax.default)
def log_softmax(x, dim, half_to_float):
    """`out[i, j] = x[i, j] - most[i] - log sum_k exp(x[i, k] - most[i])`"""
    y = _below_most(x, dim)
    out = y - summed(y.exp(), [dim] if x.ndim else []).log()
    return out.to(torch.float32 if half_to_float else x.dtype)


@decomposition(aten._softmax_backward_data.default)
def softmax_backward(grad, out, dim, input_dtype):
    """`dx[i, j] = out[i, j] * grad[i, j] - out[i, j] * sum_k grad[i, k] * out[i, k]`"""
    weighted = wide(grad) * wide(out)
    return (weighted - wide(out) * summed(weighted, [dim] if out.ndim else [])).to(input_dtype)


@decomposition(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad, out, dim, input_dtype):
    """`dx[i, j] = grad[i, j] - exp(out[i, j]) * sum_k grad[i, k]`"""
    total = summed(wide(grad), [dim] if out.ndim else [])
    return (wide(grad) - wide(out).exp() * total).to(input_dtype)
