"""Convolutions: images are independent, and so are output channels; input channels are summed.

`out[n, o, y] = bias[o] + sum_{i, k} x[n, i, y * stride + k] * weight[o, i, k]`

The weight is `[o, i, ...]`, transposed `[i, o, ...]`. With groups, runs of input channels go with
runs of output channels, and only whole groups are cut. A block of rows is made from the rows that
its windows cover, transposed from those whose windows meet it, and its gradient the reverse.
`how` are stride, padding, dilation, transposed, output padding and groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fdtensor.ops.notation.core import At, Halo, P, R, S, Units, rule
from fdtensor.ops.notation.local_index import subset
from fdtensor.ops.notation.windows import Windows, cut_dims, fitted, per_dim, slides

aten = torch.ops.aten


def channels(x, weight, transposed: bool, groups: int) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Cuts of channels: of `x`, `weight`, `bias` and the output, which is `P` where it is a sum."""
    o, i = (1, 0) if transposed else (0, 1)
    if groups == 1:
        yield R, S(o), S(0), S(1)
        yield S(1), S(i), P, P
    else:
        outs = weight.shape[1] if transposed else weight.shape[0] // groups
        ins = x.shape[1] // groups
        if ins and outs:
            yield (
                Units(1, ins),
                Units(0, weight.shape[0] // groups),
                Units(0, outs),
                Units(1, outs),
            )


def _windows(x: Sequence[int], weight: Sequence[int], how: Any) -> dict[int, Windows]:
    """The windows of the larger image, one for each element of the smaller one, in each dim."""
    *shape, transposed, more, _ = how
    sizes = list(x[2:])
    if transposed:  # `x` is the smaller one
        stride, padding, dilation, more = (per_dim(v, len(sizes)) for v in (*shape, more))
        for d, (s, p) in enumerate(zip(stride, padding, strict=True)):
            sizes[d] = (sizes[d] - 1) * s - 2 * p + dilation[d] * (weight[2 + d] - 1) + 1 + more[d]
    return dict(enumerate(slides(sizes, weight[2:], *shape), 2))


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
        result, first = x.new_zeros(out.shape), None
    else:
        for d in () if transposed else dims:
            x = fitted(x, d, block.box[d], windows[d].over(out.start[d], out.stop[d]))
        result = aten.convolution.default(x, weight, first, *_inner(at, 0, how, dims))
        for d in dims if transposed else ():
            seen = windows[d].over(block.start[d], block.stop[d])
            result = fitted(result, d, (seen,), (out.start[d], out.stop[d]))
    if bias is None or first is not None:
        return result
    return result + bias.reshape(-1, *[1] * (x.ndim - 2))


@rule(aten.convolution.default, local=_convolution)
def convolution(x, weight, bias, *how):
    """`out[n, o, y] = bias[o] + sum_{i, k} x[n, i, y * stride + k] * weight[o, i, k]`"""

    def ins(x_, weight_, bias_):
        return (x_, weight_) if bias is None else (x_, weight_, bias_)

    yield ins(S(0), R, R), S(0)
    for *cuts, out in channels(x, weight, how[3], how[5]):
        yield ins(*cuts), out
    yield ins(P, R, P), P
    yield ins(R, P, P), P
    for d, along in _windows(x.shape, weight.shape, how).items():
        size, needed = (along.size, along.meeting) if how[3] else (along.count, along.over)
        if size > 1:
            yield ins(Halo(d, size, needed), R, R), S(d)


def _share(grad: int, x: int, start: int, stop: int) -> tuple[int, int]:
    """The range of `grad` elements that a block of the `x` elements adds up for the bias."""
    return start * grad // x, stop * grad // x


def _convolution_backward(at: At, grad, x, weight, bias_sizes, *rest):
    *how, wanted = rest
    above, block = at.ins[:2]
    windows, dims = _windows(block.full, weight.shape, how), cut_dims(x.ndim - 2, above, block)
    x_, weight_, own, seen = torch.zeros_like(x), torch.zeros_like(weight), grad, {}
    for d in dims:
        span = block.start[d], block.stop[d]
        own = subset(own, d, above.box[d], (_share(above.full[d], block.full[d], *span),))
        if how[3]:
            grad = fitted(grad, d, above.box[d], windows[d].over(*span))
        else:
            met = windows[d].meeting(*span)
            grad, seen[d] = fitted(grad, d, above.box[d], met), windows[d].over(*met)
            x = fitted(x, d, block.box[d], seen[d])
    grads = [x_, weight_, own.sum([0, *range(2, grad.ndim)])]
    mask = [*wanted[:2], wanted[2] and not dims]
    if any(mask) and 0 not in (*grad.shape, *x.shape, *weight.shape):
        sizes, inner = bias_sizes and [grad.shape[1]], _inner(at, 1, how, dims)
        results = aten.convolution_backward.default(grad, x, weight, sizes, *inner, mask)
        grads = [new if m else old for new, m, old in zip(results, mask, grads, strict=True)]
        for d, covered in seen.items() if wanted[0] else ():
            grads[0] = fitted(grads[0], d, (covered,), (block.start[d], block.stop[d]))
    return [t for t, m in zip(grads, wanted, strict=True) if m]


@rule(aten.convolution_backward.default, local=_convolution_backward)
def convolution_backward(grad, x, weight, bias_sizes, *rest):
    """`weight'[o, i, k] = sum_{n, y} grad[n, o, y] * x[n, i, y * stride + k]`, if wanted

    And `x'[n, i, y * stride + k] = sum_o grad[n, o, y] * weight[o, i, k]` before it, and
    `bias'[o] = sum_{n, y} grad[n, o, y]` after it.
    """
    *how, output_mask = rest

    def masked(*outs):
        return tuple(p for p, is_wanted in zip(outs, output_mask, strict=True) if is_wanted)

    yield (S(0), S(0), R), masked(S(0), P, P)
    for x_, weight_, bias_, out in channels(x, weight, how[3], how[5]):
        outs = masked(P if x_ == R else x_, weight_, R if out == P else bias_)
        yield (R if out == P else out, x_, weight_), outs
    yield (P, R, R), masked(P, P, P)
    for x_, weight_ in ((P, R), (R, P), (P, P)):
        yield (R, x_, weight_), masked(weight_, x_, R)
    for d, along in _windows(x.shape, weight.shape, how).items():
        reach, size = along.over if how[3] else along.meeting, x.shape[d]

        def needed(start, stop, d=d, reach=reach, size=size):
            return [reach(start, stop), _share(grad.shape[d], size, start, stop)]

        if size > 1:
            needs = Halo(d, size, needed if output_mask[2] else reach)
            yield (needs, S(d), R), masked(S(d), P, P)
