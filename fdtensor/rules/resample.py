"""Ops that sample images anew: resizing, shuffles of pixels, windows as columns, grids."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from fdtensor.rules.core import P, R, S, U, rule
from fdtensor.rules.empty import unless_empty

aten = torch.ops.aten

RESIZED = [
    aten._upsample_bicubic2d_aa.default,
    aten._upsample_bilinear2d_aa.default,
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
    aten.upsample_bicubic2d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_linear1d.default,
    aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest3d.default,
    aten.upsample_trilinear3d.default,
]

RESIZED_BACKWARD = [
    aten._upsample_bicubic2d_aa_backward.default,
    aten._upsample_bilinear2d_aa_backward.default,
    aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
    aten._upsample_nearest_exact3d_backward.default,
    aten.upsample_bicubic2d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_linear1d_backward.default,
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default,
    aten.upsample_trilinear3d_backward.default,
]


def _sized(op: Any) -> Any:
    """`op` on a gradient, whose third argument is the shape of the output."""

    def local(at, grad, output_size, input_size, *args, **kwargs):
        shape = at.outs[0].shape
        return unless_empty(op)(at, grad, output_size, list(shape), *args, **kwargs)

    return local


def _resize(op: Any, local: Any) -> None:
    @rule(op, local=local)
    def rows(x, *_, **__):
        """`out[n, c, y] = sum_x a[y, x] * x[n, c, x]`"""
        yield (P,), P
        yield (S(0),), S(0)
        yield (S(1),), S(1)


for op in RESIZED:
    _resize(op, unless_empty(op))
for op in RESIZED_BACKWARD:
    _resize(op, _sized(op))


@rule(aten.pixel_shuffle.default, local=unless_empty(aten.pixel_shuffle.default))
def pixel_shuffle(x, factor):
    """`out[c, y * factor + i, x * factor + j] = x[(c * factor + i) * factor + j, y, x]`"""
    yield (P,), P
    for d in range(x.ndim - 3):
        yield (S(d),), S(d)
    for d, inner, outer in _shuffled(x.ndim, factor):
        yield (U(d, inner),), U(d, outer)


@rule(aten.pixel_unshuffle.default, local=unless_empty(aten.pixel_unshuffle.default))
def pixel_unshuffle(x, factor):
    """`out[(c * factor + i) * factor + j, y, x] = x[c, y * factor + i, x * factor + j]`"""
    yield (P,), P
    for d in range(x.ndim - 3):
        yield (S(d),), S(d)
    for d, inner, outer in _shuffled(x.ndim, factor):
        yield (U(d, outer),), U(d, inner)


def _shuffled(ndim: int, factor: int) -> list[tuple[int, int, int]]:
    """The channels, rows and columns, with their units in the smaller and the larger image."""
    return [(ndim - 3, factor * factor, 1), (ndim - 2, 1, factor), (ndim - 1, 1, factor)]


@rule(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def channel_shuffle(x, groups):
    """`out[n, c * groups + g, ...] = x[n, g * (channels / groups) + c, ...]`"""
    yield (P,), P
    for d in range(x.ndim):
        if d != 1:
            yield (S(d),), S(d)


@rule(aten.im2col.default, local=unless_empty(aten.im2col.default))
def im2col(x, kernel_size, dilation, padding, stride):
    """`out[n, (c, k), y] = x[n, c, y * stride + k]`"""
    yield (P,), P
    if x.ndim == 4:
        yield (S(0),), S(0)
    d = x.ndim - 3
    yield (U(d, 1),), U(d, prod(kernel_size))


@rule(aten.col2im.default, local=unless_empty(aten.col2im.default))
def col2im(x, output_size, kernel_size, dilation, padding, stride):
    """`out[n, c, y * stride + k] += x[n, (c, k), y]`"""
    yield (P,), P
    if x.ndim == 3:
        yield (S(0),), S(0)
    d = x.ndim - 2
    yield (U(d, prod(kernel_size)),), U(d, 1)


@rule(aten.grid_sampler_2d.default, local=unless_empty(aten.grid_sampler_2d.default))
@rule(aten.grid_sampler_3d.default, local=unless_empty(aten.grid_sampler_3d.default))
def grid_sampler(x, grid, interpolation_mode, padding_mode, align_corners):
    """`out[n, c, y] = x[n, c, grid[n, y]]`, between the elements around that place"""
    yield (S(0), S(0)), S(0)
    yield (S(1), R), S(1)
    for d in range(1, grid.ndim - 1):
        yield (R, S(d)), S(d + 1)
    yield (P, R), P


@rule(
    aten.grid_sampler_2d_backward.default,
    local=unless_empty(aten.grid_sampler_2d_backward.default),
)
@rule(
    aten.grid_sampler_3d_backward.default,
    local=unless_empty(aten.grid_sampler_3d_backward.default),
)
def grid_sampler_backward(
    grad, x, grid, interpolation_mode, padding_mode, align_corners, output_mask
):
    """`x'[n, c, grid[n, y]] += grad[n, c, y]`, if wanted, and `grid'[n, y]`, a sum over `c`"""

    def given(x_, grid_):
        return (x_, grid_) if output_mask[0] else grid_

    yield (S(0), S(0), S(0)), given(S(0), S(0))
    yield (S(1), S(1), R), given(S(1), P)
    for d in range(1, grid.ndim - 1):
        yield (S(d + 1), R, S(d)), given(P, S(d))
    yield (P, R, R), given(P, P)
    yield (R, P, R), given(R, P)


def _affine_grid(at, theta, size, align_corners):
    local = [at.outs[0].shape[0], *size[1:]]
    return aten.affine_grid_generator.default(theta, local, align_corners)


@rule(aten.affine_grid_generator.default, local=_affine_grid)
def affine_grid_generator(theta, size, align_corners):
    """`out[n, y] = theta[n] @ place(y)`"""
    yield (P,), P
    yield (S(0),), S(0)
