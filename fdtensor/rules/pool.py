"""Pooling and padding: every image and every channel is independent.

The ops treat the last one, two or three dims; a cut of any dim before those cuts all tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.rules.core import P, R, S, rule
from fdtensor.rules.empty import unless_empty
from fdtensor.rules.pointwise import tensors

aten = torch.ops.aten

LINEAR = {
    1: [aten.avg_pool1d.default, aten.reflection_pad1d.default, aten.replication_pad1d.default],
    2: [
        aten._adaptive_avg_pool2d.default,
        aten.avg_pool2d.default,
        aten.reflection_pad2d.default,
        aten.replication_pad2d.default,
    ],
    3: [
        aten._adaptive_avg_pool3d.default,
        aten.avg_pool3d.default,
        aten.reflection_pad3d.default,
        aten.replication_pad3d.default,
    ],
}
"""Ops of one tensor, linear in it, by the number of dims that they treat."""

MAXIMA = {
    1: [aten.adaptive_max_pool1d.default],
    2: [aten.adaptive_max_pool2d.default, aten.max_pool2d_with_indices.default],
    3: [aten.adaptive_max_pool3d.default, aten.max_pool3d_with_indices.default],
}
"""Ops of one tensor that give the maxima and where in the plane they are."""

BACKWARD = {
    1: [aten.reflection_pad1d_backward.default, aten.replication_pad1d_backward.default],
    2: [
        aten._adaptive_avg_pool2d_backward.default,
        aten.adaptive_max_pool2d_backward.default,
        aten.avg_pool2d_backward.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.reflection_pad2d_backward.default,
        aten.replication_pad2d_backward.default,
    ],
    3: [
        aten._adaptive_avg_pool3d_backward.default,
        aten.adaptive_max_pool3d_backward.default,
        aten.avg_pool3d_backward.default,
        aten.max_pool3d_with_indices_backward.default,
        aten.reflection_pad3d_backward.default,
        aten.replication_pad3d_backward.default,
    ],
}
"""Ops of a gradient and tensors with its leading dims, linear in the gradient."""


def _linear(op: Any, treated: int) -> None:
    @rule(op, local=unless_empty(op))
    def rows(x, *_, **__):
        """`out[n, c, y] = sum_x a[y, x] * x[n, c, x]`"""
        yield (P,), P
        for d in range(x.ndim - treated):
            yield (S(d),), S(d)


def _maxima(op: Any, treated: int) -> None:
    @rule(op, local=unless_empty(op, torch.int64))
    def rows(x, *_, **__):
        """`out[n, c, y], where[n, c, y] = max_x x[n, c, x]` for `x` in the window of `y`"""
        for d in range(x.ndim - treated):
            yield (S(d),), (S(d), S(d))


def _backward(op: Any, treated: int) -> None:
    @rule(op, local=unless_empty(op))
    def rows(grad, *others, **named):
        """`out[n, c, x] = sum_y a[n, c, y, x] * grad[n, c, y]`"""
        rest = len(tensors((*others, *named.values())))
        yield (P, *[R] * rest), P
        for d in range(grad.ndim - treated):
            yield (S(d), *[S(d)] * rest), S(d)


for register, ops in ((_linear, LINEAR), (_maxima, MAXIMA), (_backward, BACKWARD)):
    for treated, named in ops.items():
        for op in named:
            register(op, treated)
