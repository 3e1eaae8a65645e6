"""Normalizations: each slice has a mean and a deviation, and a cut between slices leaves all whole.

A cut of what is averaged over needs the numbers of the other blocks: see `fdtensor.decompositions`.

    native_layer_norm   `out[i, j] = xhat[i, j] * weight[j] + bias[j]`
                        `xhat[i, j] = (x[i, j] - mean_j x[i, j]) * rstd[i]`
    _fused_rms_norm     `out[i, j] = x[i, j] * rstd[i] * weight[j]`
    their backward      `dweight[j] = sum_i grad[i, j] * xhat[i, j], dbias[j] = sum_i grad[i, j]`
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from fdtensor.graph import Full, tensors_of
from fdtensor.notation.core import P, R, S, U, rule
from fdtensor.notation.each import each

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


def never_empty(op: Any) -> Any:
    """`op`, that on empty blocks, where kernels fail, takes a zero and drops what it becomes."""

    def local(at, *args):
        def filled(t):
            if not isinstance(t, torch.Tensor) or t.numel() or not t.is_floating_point():
                return t
            return t.new_zeros([max(1, n) for n in t.shape])

        made = tensors_of(op(*map(filled, args)))
        return [
            t if t.shape == b.shape or 0 not in b.shape else t.new_zeros(b.shape)
            for t, b in zip(made, at.outs)
        ]

    return local


def layer_norm(op, given):
    """Cuts of the leading dims `i`."""
    x, *parameters = (t for t in given.values() if isinstance(t, Full))
    for d in range(x.ndim - len(given["normalized_shape"])):
        yield (S(d), *[R] * len(parameters)), (S(d),) * len(op._schema.returns)


def layer_norm_backward(op, given):
    """The same; the gradients of parameters are sums over `i`."""
    tensors = {name: t for name, t in given.items() if isinstance(t, Full)}
    for d in range(given["input"].ndim - len(given["normalized_shape"])):
        ins = [R if name in ("weight", "bias") else S(d) for name in tensors]
        yield tuple(ins), masked(given["output_mask"], (S(d), P, P))
    yield (P, *[R] * (len(tensors) - 1)), masked(given["output_mask"], (P, P, P))


for _op in (aten.native_layer_norm.default, aten._fused_rms_norm.default):
    each(_op, local=never_empty(_op))(layer_norm)
for _op in (aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default):
    each(_op, local=never_empty(_op))(layer_norm_backward)


def _on_groups(op: Any) -> Any:
    """The kernel with the sizes of a block: N, C, HxW and how many groups it holds."""
    x_at = 0 if op is aten.native_group_norm.default else 1

    def sized(*args):
        tensors = [t.contiguous() if isinstance(t, torch.Tensor) else t for t in args[:-5]]
        per = args[-4] // args[-2]
        shape = tensors[x_at].shape
        return op(*tensors, shape[0], shape[1], prod(shape[2:]), shape[1] // per or 1, args[-1])

    return never_empty(sized)


@rule(aten.native_group_norm.default, local=_on_groups(aten.native_group_norm.default))
def group_norm(x, weight, bias, N, C, HxW, group, eps):
    """`out[n, g, c] = (x[n, g, c] - mean_c x[n, g, c]) * rstd[n, g] * weight[g, c] + bias[g, c]`"""
    if x.numel:
        yield given((x, S(0)), (weight, R), (bias, R)), (S(0),) * 3
        whole, out = U(0, C // group), U(1, C // group)  # whole groups of channels
        yield given((x, out), (weight, whole), (bias, whole)), (out, S(1), S(1))


@rule(
    aten.native_group_norm_backward.default,
    local=_on_groups(aten.native_group_norm_backward.default),
)
def group_norm_backward(grad, x, mean, rstd, weight, N, C, HxW, group, output_mask):
    """`dbias[c] = sum_n grad[n, c], dweight[c] = sum_n grad[n, c] * xhat[n, c]`"""
    if x.numel:
        yield (*(S(0),) * 4, *given((weight, R))), masked(output_mask, (S(0), P, P))
        whole, out = U(0, C // group), U(1, C // group)
        ins = (out, out, S(1), S(1), *given((weight, whole)))
        yield ins, masked(output_mask, (out, whole, whole))
    yield (P, R, R, R, *given((weight, R))), masked(output_mask, (P, P, P))
