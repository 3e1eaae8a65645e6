"""Convolutions: images are independent, and so are output channels; input channels are summed.

`out[n, o, y] = bias[o] + sum_{i, k} x[n, i, y * stride + k] * weight[o, i, k]`

The weight is `[o, i, ...]`, transposed `[i, o, ...]`. With groups, runs of input channels go with
runs of output channels, and only whole groups are cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fdtensor.rules.core import P, R, S, U, rule

aten = torch.ops.aten


def channels(x, weight, transposed: bool, groups: int) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Cuts of channels: of `x`, `weight`, `bias` and the output, which is `P` where it is a sum."""
    o, i = (1, 0) if transposed else (0, 1)
    if groups == 1:
        yield R, S(o), S(0), S(1)
        yield S(1), S(i), P, P
    else:
        made = weight.shape[1] if transposed else weight.shape[0] // groups
        taken = x.shape[1] // groups
        yield U(1, taken), U(0, weight.shape[0] // groups), U(0, made), U(1, made)


def _groups(at, groups: int, x: int) -> int:
    """How many groups the block of input number `x` has."""
    block = at.ins[x]
    return groups if groups == 1 else block.shape[1] // (block.full[1] // groups)


def _convolution(
    at, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
):
    (out,) = at.outs
    if 0 in (*at.ins[0].shape, *at.ins[1].shape, *out.shape):
        made = x.new_zeros(out.shape)
        return made if bias is None else made + bias.reshape(-1, *[1] * (len(out.shape) - 2))
    local = _groups(at, groups, 0)
    return aten.convolution.default(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, local
    )


@rule(aten.convolution.default, local=_convolution)
def convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """`out[n, o, y] = bias[o] + sum_{i, k} x[n, i, y * stride + k] * weight[o, i, k]`"""

    def given(x_, weight_, bias_):
        return (x_, weight_) if bias is None else (x_, weight_, bias_)

    yield given(S(0), R, R), S(0)
    for *ins, out in channels(x, weight, transposed, groups):
        yield given(*ins), out
    yield given(P, R, P), P
    yield given(R, P, P), P


def _convolution_backward(
    at, grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
    output_mask,
):  # fmt: skip
    if any(0 in block.shape for block in at.ins):
        made = [torch.zeros_like(x), torch.zeros_like(weight)]
        made.append(grad.sum([0, *range(2, grad.ndim)]))
        return [t for t, wanted in zip(made, output_mask) if wanted]
    made = aten.convolution_backward.default(
        grad, x, weight, None if bias_sizes is None else [grad.shape[1]], stride, padding,
        dilation, transposed, output_padding, _groups(at, groups, 1), output_mask,
    )  # fmt: skip
    return [t for t in made if t is not None]


@rule(aten.convolution_backward.default, local=_convolution_backward)
def convolution_backward(
    grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
    output_mask,
):  # fmt: skip
    """`weight'[o, i, k] = sum_{n, y} grad[n, o, y] * x[n, i, y * stride + k]`, if wanted

    And `x'[n, i, y * stride + k] = sum_o grad[n, o, y] * weight[o, i, k]` before it, and
    `bias'[o] = sum_{n, y} grad[n, o, y]` after it.
    """

    def given(*outs):
        return tuple(p for p, wanted in zip(outs, output_mask) if wanted)

    yield (S(0), S(0), R), given(S(0), P, P)
    for x_, weight_, bias_, out in channels(x, weight, transposed, groups):
        yield (
            (R if out == P else out, x_, weight_),
            given(P if x_ == R else x_, weight_, R if out == P else bias_),
        )
    yield (P, R, R), given(P, P, P)
    yield (R, P, R), given(R, P, R)
    yield (R, R, P), given(P, R, R)
