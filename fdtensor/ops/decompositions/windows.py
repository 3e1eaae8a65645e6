"""Windows over two dims as windows over one dim after the other, whose rules have halos."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fdtensor.ops.decompositions.core import decomposition

aten = torch.ops.aten


@decomposition(aten.im2col.default)
def im2col(x, kernel_size, dilation, padding, stride):
    """`out[n, (c, k, l), (i, j)] = x[n, c, i * s + k, j * t + l]`, padded first"""
    (down, across), lead = padding, x.shape[:-3]
    x = F.pad(x, [across, across, down, down])
    for d, k, by, step in zip((-2, -1), kernel_size, dilation, stride, strict=True):
        x = x.unfold(d - (d == -1), (k - 1) * by + 1, step)[..., ::by]
    wide = x.movedim((-2, -1), (-4, -3))
    channels, rows, columns = wide.shape[len(lead)], *wide.shape[-2:]
    return wide.reshape(*lead, channels * kernel_size[0] * kernel_size[1], rows * columns)


@decomposition(aten.col2im.default)
def col2im(x, output_size, kernel_size, dilation, padding, stride):
    """`out[n, c, i * s + k, j * t + l] = sum x[n, (c, k, l), (i, j)]`, without the padding"""
    padded = [n + 2 * p for n, p in zip(output_size, padding, strict=True)]
    spread = [(k - 1) * by + 1 for k, by in zip(kernel_size, dilation, strict=True)]
    counts = [(n - w) // step + 1 for n, w, step in zip(padded, spread, stride, strict=True)]
    x = x.reshape(*x.shape[:-2], -1, *kernel_size, *counts).movedim((-4, -3), (-2, -1))
    for d in (1, 0):  # the last dim is within windows, of those along the third last
        if dilation[d] > 1:
            wide = [*x.shape[:-1], spread[d]]
            x = aten.slice_backward.default(x, wide, x.ndim - 1, 0, spread[d], dilation[d])
        at = x.ndim - 3
        shape = [*x.shape[:at], padded[d], *x.shape[at + 1 : -1]]
        x = aten.unfold_backward.default(x, shape, at, spread[d], stride[d])
    (down, across), (height, width) = padding, output_size
    return x[..., down : down + height, across : across + width]
