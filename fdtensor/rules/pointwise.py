"""Elementwise ops: every output element depends on the elements at its own place.

Ops with `torch.Tag.pointwise` and no rule of their own have the generic one; rules/linear.py and
rules/bilinear.py let pending sums pass, rules/monotone.py pending maxima and minima.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fdtensor.graph import Full
from fdtensor.placement import Placement
from fdtensor.rules.core import R, S, rule

aten = torch.ops.aten


def tensors(args: tuple[Any, ...]) -> list[Full]:
    """The tensors among the arguments of an op, those of lists too, in order."""
    found = []
    for arg in args:
        if isinstance(arg, Full):
            found.append(arg)
        elif isinstance(arg, tuple):
            found += tensors(arg)
    return found


def broadcast(ins: list[Full]) -> Iterator[tuple[tuple[Placement, ...], Placement]]:
    """`out[i, j] = f(a[i, j], b[0, j], c[j])`: a cut of a dim of the output cuts it in each."""
    shape = torch.broadcast_shapes(*(t.shape for t in ins))
    for d, size in enumerate(shape):
        if size != 1:
            at = [d - (len(shape) - t.ndim) for t in ins]
            yield tuple(S(i) if i >= 0 and t.shape[i] == size else R for i, t in zip(at, ins)), S(d)


@rule(
    "pointwise",
    aten.__and__.Tensor,
    aten.__or__.Tensor,
    aten._standard_gamma_grad.default,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.hardswish.default,
    aten.isin.Tensor_Scalar,
    aten.polar.default,
)
def pointwise(*args, **kwargs):
    """`out[i] = f(a[i], b[i], ...)`"""
    yield from broadcast(tensors((*args, *kwargs.values())))


@rule(aten.frexp.Tensor, aten.log_sigmoid_forward.default)
def pair(x):
    """`out[i], other[i] = f(x[i])`"""
    for before, after in broadcast([x]):
        yield before, (after, after)


@rule(aten.isin.Tensor_Tensor)
def isin(x, values, *, assume_unique=False, invert=False):
    """`out[i] = any(x[i] == v for v in values)`"""
    for d in range(x.ndim):
        yield (S(d), R), S(d)
