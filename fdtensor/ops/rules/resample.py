"""Ops that sample images anew: averages, paddings, resizing, shuffles of pixels, columns, grids."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from fdtensor.layouts.placement import StridedShard
from fdtensor.layouts.torch_private import schema_of
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import At, Halo, P, R, S, Units, rule
from fdtensor.ops.notation.empty import unless_empty
from fdtensor.ops.notation.formula import formula
from fdtensor.ops.notation.ops import on
from fdtensor.ops.notation.windows import Taps, cut_dims, per_dim, taps

aten = torch.ops.aten


def _only(values: Any, n: int, d: int, other: Any) -> tuple[Any, ...]:
    """The value of dim `d`, and `other` for each other dim."""
    return tuple(value if i == d else other for i, value in enumerate(per_dim(values, n)))


def _averaged(n, d, kernel, stride=(), padding=0, ceil=False, include=True, divisor=None):
    sizes = _only(kernel, n, d, 1), _only(stride or kernel, n, d, 1), _only(padding, n, d, 0)
    return (*sizes, ceil, include, divisor and (divisor if d == 0 else 1))


def _padded(n, d, pads):
    return (tuple(pad if i // 2 == n - 1 - d else 0 for i, pad in enumerate(pads)),)


def _resized(n, d, counts, *rest):
    return (_only(counts, n, d, 2), *rest[:-n], *_only(rest[-n:], n, d, None))


LINEAR = {
    "reflection_pad{}d": (_padded, 1, 2, 3),
    "replication_pad{}d": (_padded, 1, 2, 3),
    "avg_pool{}d": (_averaged, 2, 3),
    "_adaptive_avg_pool{}d": (_resized, 2, 3),
    "upsample_nearest{}d": (_resized, 1, 2, 3),
    "_upsample_nearest_exact{}d": (_resized, 1, 2, 3),
    "upsample_linear{}d": (_resized, 1),
    "upsample_bilinear{}d": (_resized, 2),
    "upsample_bicubic{}d": (_resized, 2),
    "upsample_trilinear{}d": (_resized, 3),
    "_upsample_bilinear{}d_aa": (_resized, 2),
    "_upsample_bicubic{}d_aa": (_resized, 2),
}
"""Ops that are linear along each of their last dims: their arguments for one, numbers of dims."""


# the rows and what a rank computes read the same taps, and are made for one op
def _linear(op: Any, forward: Any, n: int, along: Callable[..., Any]) -> None:
    """The rule of an op of this kind, or of its gradient, which takes `x` or its shape besides."""
    back, sized = op is not forward, "input_size" in str(schema_of(op))

    def lines(x, *args) -> list[Taps]:
        """The taps along each dim; none where some are not known."""
        sizes = x.shape[-n:]
        if sized:
            sizes, args = args[1][-n:], (args[0], *args[2:])
        elif back:
            sizes, args = args[0].shape[-n:], args[1:] or (sizes,)
        wide = x.dtype in (torch.float64, torch.complex128)
        kind = torch.float64 if wide else torch.float32
        each_dim = [
            taps(forward, size, n, d, along(n, d, *args), kind) if size else None
            for d, size in enumerate(sizes)
        ]
        known = [t.transposed() if back else t for t in each_dim if t]
        return known if len(known) == n else []

    def local(at: At, x, *args):
        block, out = at.ins[0], at.outs[0]
        if not cut_dims(n, *at.ins, out):
            args = (args[0], out.shape, *args[2:]) if sized else args
            return unless_empty(op)(at, x, *args)
        if 0 in (*x.shape, *out.shape):
            return x.new_zeros(out.shape)
        fulls = [Full(b.full, x.dtype) for b in at.ins]
        result = x.float() if x.dtype.itemsize == 2 else x
        for d, line in enumerate(lines(*fulls, *args[len(fulls) - 1 :]), x.ndim - n):
            result = line(result, d, block.box[d], (out.start[d], out.stop[d]))
        return result.to(x.dtype)

    @rule(op, local=local)
    def rows(x, *args):
        """`out[n, c, y] = sum_x a[y, x] * x[n, c, x]`; of a gradient, the same with `a[x, y]`"""
        others, lead, along_dims = int(back and not sized), x.ndim - n, lines(x, *args)
        for d in range(lead):
            yield (S(d), *[S(d)] * others), S(d)
        rounded = not (x.dtype.is_floating_point or x.dtype.is_complex)
        if rounded and any((line.weights != 1).any() for line in along_dims):
            return
        yield (P, *[R] * others), P
        for unread in (P, R) if others else ():
            yield (unread, P), unread
        for d, line in enumerate(along_dims, lead):
            if line.count > 1:
                yield (Halo(d, line.count, line.over), *[S(d)] * others), S(d)
            if line.count < line.size:
                yield (S(d), *[R] * others), P


for name, (along, *dims) in LINEAR.items():
    for n in dims:
        forward = getattr(aten, name.format(n)).default
        _linear(forward, forward, n, along)
        _linear(getattr(aten, f"{name.format(n)}_backward").default, forward, n, along)


def regrouped(x, n, *units):
    """Dims before the last `n` stay; of those after it, whole units become whole units."""
    yield (P,), P
    for d in range(x.ndim - n):
        yield (S(d),), S(d)
    for d, (before, after) in enumerate(units, x.ndim - n):
        yield (Units(d, before),), Units(d, after)


@on("pixel_shuffle", unless_empty, whole=True)
def pixel_shuffle(x, factor):
    """`out[c, y * factor + i, x * factor + j] = x[(c * factor + i) * factor + j, y, x]`"""
    yield from regrouped(x, 3, (factor * factor, 1), (1, factor), (1, factor))


@on("pixel_unshuffle", unless_empty, whole=True)
def pixel_unshuffle(x, factor):
    """`out[(c * factor + i) * factor + j, y, x] = x[c, y * factor + i, x * factor + j]`"""
    yield from regrouped(x, 3, (1, factor * factor), (factor, 1), (factor, 1))


@on("channel_shuffle native_channel_shuffle")
def channel_shuffle(x, groups):
    """`out[n, c * groups + g, ...] = x[n, g * (channels / groups) + c, ...]`"""
    yield (P,), P
    for d in range(x.ndim):
        yield (S(d) if d != 1 else StridedShard(1, groups),), S(d) if d != 1 else Units(1, groups)


@on("im2col", unless_empty)
def im2col(x, kernel, *_):
    """`out[n, (c, k), y] = x[n, c, y * stride + k]`"""
    yield from regrouped(x, 3, (1, prod(kernel)))


@on("col2im", unless_empty)
def col2im(x, size, kernel, *_):
    """`out[n, c, y * stride + k] = x[n, (c, k), y]`: overlapping terms are added up"""
    yield from regrouped(x, 2, (prod(kernel), 1))


def _grids(n: int, inner: str, outer: str) -> None:
    op = getattr(aten, f"grid_sampler_{n}d").default
    back = getattr(aten, f"grid_sampler_{n}d_backward").default

    @rule(op, local=unless_empty(op))
    def grid_sampler(x, grid, *_):
        """`out[n, c, y] = x[n, c, grid[n, y]]`, between the elements around that place"""
        yield from formula(f"n c {inner}, n {outer} K -> n c {outer}", x, grid, linear=[0])

    @rule(back, local=unless_empty(back))
    def grid_sampler_backward(grad, x, grid, mode, padding_mode, align_corners, output_mask):
        """`x'[n, c, grid[n, y]] += grad[n, c, y]`, if wanted, and `grid'[n, y]`, a sum over `c`"""
        of_x, of_grid = output_mask
        wanted = ", ".join([f"n c {inner}"] * of_x + [f"n {outer} K"] * of_grid)
        ins = f"n c {outer}, n c {inner}, n {outer} K"
        yield from formula(f"{ins} -> {wanted}", grad, x, grid, linear=[0])
        yield (R, P, R), (R,) * of_x + (P,) * of_grid


_grids(2, "H W", "y x")
_grids(3, "D H W", "z y x")


def _affine_grid(at: At, theta, size, align_corners):
    local = [at.outs[0].shape[0], *size[1:]]
    return aten.affine_grid_generator.default(theta, local, align_corners)


@rule(aten.affine_grid_generator.default, local=_affine_grid)
def affine_grid_generator(theta, size, align_corners):
    """`out[n, y] = theta[n] @ place(y)`"""
    yield (P,), P
    yield (S(0),), S(0)
