"""Normalizations: each slice has a mean and a deviation, and a cut between slices leaves all whole.

A cut of what is averaged over needs the numbers of the other blocks: see `fdtensor.decompositions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from fdtensor.rules.core import P, R, S, U, rule

aten = torch.ops.aten


def given(*pairs: tuple[Any, Any]) -> tuple[Any, ...]:
    """The placements of the arguments that are not None."""
    return tuple([placed for x, placed in pairs if x is not None])


def masked(mask: Iterable[bool], outs: Iterable[Any]) -> tuple[Any, ...]:
    """Those of `outs` that `mask` asks for: an op returns no tensor for the others."""
    return tuple([out for asked, out in zip(mask, outs) if asked])


def statistics_dtype(x, weight, bias) -> torch.dtype:
    """What kernels keep the statistics of `x` in: on a GPU 32 bits, else as the parameters."""
    if x.device.type != "cpu":
        return torch.float32 if x.dtype.itemsize < 4 else x.dtype
    parameter = weight if weight is not None else bias
    return x.dtype if parameter is None else parameter.dtype


def or_empty(op, kinds):
    """`op`, but on empty blocks, where kernels fail: zeros of these dtypes, copies of tensors."""

    def local(at, *args):
        x = args[0]
        if x.numel():
            return [t for t in op(*args) if t is not None]
        return [
            x.new_zeros(block.shape, dtype=kind) if isinstance(kind, torch.dtype) else kind.clone()
            for block, kind in zip(at.outs, kinds(*args))
        ]

    return local


@rule(aten.native_layer_norm.default)
def layer_norm(x, normalized_shape, weight, bias, eps):
    """`out[i, j] = (x[i, j] - mean_j x[i, j]) * rstd[i] * weight[j] + bias[j]`"""
    for d in range(x.ndim - len(normalized_shape)):
        yield given((x, S(d)), (weight, R), (bias, R)), (S(d),) * 3


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(grad, x, normalized_shape, mean, rstd, weight, bias, output_mask):
    """`dweight[j] = sum_i grad[i, j] * xhat[i, j], dbias[j] = sum_i grad[i, j]`"""
    parameters = given((weight, R), (bias, R))
    for d in range(x.ndim - len(normalized_shape)):
        yield (*(S(d),) * 4, *parameters), masked(output_mask, (S(d), P, P))
    yield (P, R, R, R, *parameters), masked(output_mask, (P, P, P))


def _rms_kinds(x, normalized_shape, weight, eps):
    kind = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    return kind, torch.float32 if x.dtype.itemsize < 4 else x.dtype


@rule(aten._fused_rms_norm.default, local=or_empty(aten._fused_rms_norm.default, _rms_kinds))
def rms_norm(x, normalized_shape, weight, eps):
    """`out[i, j] = x[i, j] * rstd[i] * weight[j], rstd[i] = 1 / sqrt(mean_j x[i, j]^2 + eps)`"""
    for d in range(x.ndim - len(normalized_shape)):
        yield given((x, S(d)), (weight, R)), (S(d), S(d))


def _rms_backward_kinds(grad, x, normalized_shape, rstd, weight, output_mask):
    return masked(output_mask, (x.dtype, x.dtype if weight is None else weight.dtype))


@rule(
    aten._fused_rms_norm_backward.default,
    local=or_empty(aten._fused_rms_norm_backward.default, _rms_backward_kinds),
)
def rms_norm_backward(grad, x, normalized_shape, rstd, weight, output_mask):
    """`dweight[j] = sum_i grad[i, j] * x[i, j] * rstd[i]`"""
    parameters = given((weight, R))
    for d in range(x.ndim - len(normalized_shape)):
        yield (*(S(d),) * 3, *parameters), masked(output_mask, (S(d), P))
    yield (P, R, R, *parameters), masked(output_mask, (P, P))


def _groups(at, x, group):
    """The sizes of a block as the kernels want them: N, C, HxW and how many groups it holds."""
    per = at.full[1] // group
    return x.shape[0], x.shape[1], prod(x.shape[2:]), x.shape[1] // per


def _group_norm(at, x, weight, bias, N, C, HxW, group, eps):
    n, c, hw, g = _groups(at.ins[0], x, group)
    if not x.numel():
        stats = x.new_zeros((n, g), dtype=statistics_dtype(x, weight, bias))
        return x.clone(), stats, stats.clone()
    return aten.native_group_norm(x, weight, bias, n, c, hw, g, eps)


@rule(aten.native_group_norm.default, local=_group_norm)
def group_norm(x, weight, bias, N, C, HxW, group, eps):
    """`out[n, g, c] = (x[n, g, c] - mean_c x[n, g, c]) * rstd[n, g] * weight[g, c] + bias[g, c]`"""
    if x.numel:
        yield given((x, S(0)), (weight, R), (bias, R)), (S(0),) * 3
        whole = U(0, C // group)  # whole groups of channels
        out = U(1, C // group)
        yield given((x, out), (weight, whole), (bias, whole)), (out, S(1), S(1))


def _group_norm_backward(at, grad, x, mean, rstd, weight, N, C, HxW, group, output_mask):
    n, c, hw, g = _groups(at.ins[1], x, group)
    if not x.numel():
        like = x if weight is None else weight
        return masked(output_mask, (x.clone(), like.new_zeros(c), like.new_zeros(c)))
    made = aten.native_group_norm_backward(
        grad.contiguous(), x.contiguous(), mean, rstd, weight, n, c, hw, g, output_mask
    )
    return masked(output_mask, made)


@rule(aten.native_group_norm_backward.default, local=_group_norm_backward)
def group_norm_backward(grad, x, mean, rstd, weight, N, C, HxW, group, output_mask):
    """`dbias[c] = sum_n grad[n, c], dweight[c] = sum_n grad[n, c] * xhat[n, c]`"""
    if x.numel:
        ins = (S(0),) * 4
        yield (*ins, *given((weight, R))), masked(output_mask, (S(0), P, P))
        whole, out = U(0, C // group), U(1, C // group)
        ins = (out, out, S(1), S(1))
        yield (*ins, *given((weight, whole))), masked(output_mask, (out, whole, whole))
    yield (P, R, R, R, *given((weight, R))), masked(output_mask, (P, P, P))
