"""Convolutions: images are independent, and so are output channels; input channels are summed.

`out[n, o, y] = bias[o] + sum_{i, k} x[n, i, y * stride + k] * weight[o, i, k]`

The weight is `[o, i, ...]`, transposed `[i, o, ...]`. With groups, runs of input channels go with
runs of output channels, and only whole groups are cut. A block of rows is made from what its
windows see, transposed from the rows whose windows meet it, and its gradient the other way round.
`how` are stride, padding, dilation, transposed, output padding and groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fdtensor.ops.notation.core import At, Needs, P, R, S, U, rule
from fdtensor.ops.notation.held import part
from fdtensor.ops.notation.windows import Windows, cut_dims, fitted, per_dim, slides

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
        if taken and made:
            yield U(1, taken), U(0, weight.shape[0] // groups), U(0, made), U(1, made)


def _windows(x: Sequence[int], weight: Sequence[int], how: Any) -> dict[int, Windows]:
    """The windows of the larger image, one for each element of the smaller one, in each dim."""
    *given, transposed, more, _ = how
    sizes = list(x[2:])
    if transposed:  # `x` is the smaller one
        stride, padding, dilation, more = (per_dim(v, len(sizes)) for v in (*given, more))
        for d, (s, p) in enumerate(zip(stride, padding, strict=True)):
            sizes[d] = (sizes[d] - 1) * s - 2 * p + dilation[d] * (weight[2 + d] - 1) + 1 + more[d]
    return dict(enumerate(slides(sizes, weight[2:], *given), 2))


def _inner(at: At, x: int, how: Any, dims: Sequence[int]) -> list[Any]:
    """`how` for a block of input number `x`, whose `dims` are padded already."""
    stride, padding, dilation, transposed, more, groups = how
    block = at.ins[x]
    groups = groups if groups == 1 else block.shape[1] // (block.full[1] // groups)
    padding, more = (
        [0 if d in dims else v for d, v in enumerate(per_dim(values, len(block.full) - 2), 2)]
        for values in (padding, more)
    )
    return [stride, padding, dilation, transposed, more, groups]


def _convolution(at: At, x, weight, bias, *how):
    block, out = at.ins[0], at.outs[0]
    windows, dims = _windows(block.full, weight.shape, how), cut_dims(x.ndim - 2, block, out)
    transposed, first = how[3], None if dims else bias
    if 0 in (*x.shape, *weight.shape, *out.shape):
        made, first = x.new_zeros(out.shape), None
    else:
        for d in () if transposed else dims:
            x = fitted(x, d, block.box[d], windows[d].over(out.start[d], out.stop[d]))
        made = aten.convolution.default(x, weight, first, *_inner(at, 0, how, dims))
        for d in dims if transposed else ():
            seen = windows[d].over(block.start[d], block.stop[d])
            made = fitted(made, d, (seen,), (out.start[d], out.stop[d]))
    if bias is None or first is not None:
        return made
    return made + bias.reshape(-1, *[1] * (x.ndim - 2))


@rule(aten.convolution.default, local=_convolution)
def convolution(x, weight, bias, *how):
    """`out[n, o, y] = bias[o] + sum_{i, k} x[n, i, y * stride + k] * weight[o, i, k]`"""

    def given(x_, weight_, bias_):
        return (x_, weight_) if bias is None else (x_, weight_, bias_)

    yield given(S(0), R, R), S(0)
    for *ins, out in channels(x, weight, how[3], how[5]):
        yield given(*ins), out
    yield given(P, R, P), P
    yield given(R, P, P), P
    for d, along in _windows(x.shape, weight.shape, how).items():
        made, needed = (along.size, along.meeting) if how[3] else (along.count, along.over)
        if made > 1:
            yield given(Needs(d, made, needed), R, R), S(d)


def _share(grad: int, x: int, start: int, stop: int) -> tuple[int, int]:
    """Which of `grad` elements a block of one of `x` elements adds up for the bias."""
    return start * grad // x, stop * grad // x


def _convolution_backward(at: At, grad, x, weight, bias_sizes, *rest):
    *how, wanted = rest
    above, block = at.ins[:2]
    windows, dims = _windows(block.full, weight.shape, how), cut_dims(x.ndim - 2, above, block)
    x_, weight_, own, seen = torch.zeros_like(x), torch.zeros_like(weight), grad, {}
    for d in dims:
        held = block.start[d], block.stop[d]
        own = part(own, d, above.box[d], (_share(above.full[d], block.full[d], *held),))
        if how[3]:
            grad = fitted(grad, d, above.box[d], windows[d].over(*held))
        else:
            met = windows[d].meeting(*held)
            grad, seen[d] = fitted(grad, d, above.box[d], met), windows[d].over(*met)
            x = fitted(x, d, block.box[d], seen[d])
    made = [x_, weight_, own.sum([0, *range(2, grad.ndim)])]
    mask = [*wanted[:2], wanted[2] and not dims]
    if any(mask) and 0 not in (*grad.shape, *x.shape, *weight.shape):
        sizes, inner = bias_sizes and [grad.shape[1]], _inner(at, 1, how, dims)
        found = aten.convolution_backward.default(grad, x, weight, sizes, *inner, mask)
        made = [new if m else old for new, m, old in zip(found, mask, made, strict=True)]
        for d, span in seen.items() if wanted[0] else ():
            made[0] = fitted(made[0], d, (span,), (block.start[d], block.stop[d]))
    return [t for t, m in zip(made, wanted, strict=True) if m]


@rule(aten.convolution_backward.default, local=_convolution_backward)
def convolution_backward(grad, x, weight, bias_sizes, *rest):
    """`weight'[o, i, k] = sum_{n, y} grad[n, o, y] * x[n, i, y * stride + k]`, if wanted

    And `x'[n, i, y * stride + k] = sum_o grad[n, o, y] * weight[o, i, k]` before it, and
    `bias'[o] = sum_{n, y} grad[n, o, y]` after it.
    """
    *how, output_mask = rest

    def given(*outs):
        return tuple(p for p, wanted in zip(outs, output_mask, strict=True) if wanted)

    yield (S(0), S(0), R), given(S(0), P, P)
    for x_, weight_, bias_, out in channels(x, weight, how[3], how[5]):
        outs = given(P if x_ == R else x_, weight_, R if out == P else bias_)
        yield (R if out == P else out, x_, weight_), outs
    yield (P, R, R), given(P, P, P)
    for x_, weight_ in ((P, R), (R, P), (P, P)):
        yield (R, x_, weight_), given(weight_, x_, R)
    for d, along in _windows(x.shape, weight.shape, how).items():
        reach, made = along.over if how[3] else along.meeting, x.shape[d]

        def needed(start, stop, d=d, reach=reach, made=made):
            return [reach(start, stop), _share(grad.shape[d], made, start, stop)]

        if made > 1:
            needs = Needs(d, made, needed if output_mask[2] else reach)
            yield (needs, S(d), R), given(S(d), P, P)
