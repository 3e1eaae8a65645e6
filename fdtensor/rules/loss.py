"""Losses: a term for each element, and by `reduction` 0 all of them, 1 their mean, 2 their sum."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from fdtensor.graph import Full
from fdtensor.rules.core import P, R, S, rule
from fdtensor.rules.pointwise import broadcast, tensors

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""The values of `reduction`."""


def _place(op: Any) -> int:
    return [a.name for a in op._schema.arguments].index("reduction")


def elementwise_loss(op: Any) -> None:
    """`out = sum_i f(x[i], y[i], ...) / n`, with `n` the full number of elements"""
    place = _place(op)

    def local(at, *args):
        if args[place] != MEAN:
            return op(*args)
        held = prod(torch.broadcast_shapes(*(b.shape for b in at.ins)))
        full = prod(torch.broadcast_shapes(*(b.full for b in at.ins)))
        if not held:
            return args[0].new_zeros(())
        return op(*args) * (held / full)

    @rule(op, local=local)
    def rows(*args):
        for before, after in broadcast(tensors(args)):
            yield before, after if args[place] == NONE else P


def elementwise_loss_backward(op: Any) -> None:
    """`dx[i] = grad * f'(x[i], y[i], ...) / n`, with `n` the full number of elements"""
    place = _place(op)

    def local(at, *args):
        if args[place] != MEAN:
            return op(*args)
        full = prod(torch.broadcast_shapes(*(b.full for b in at.ins)))
        return op(*args[:place], SUM, *args[place + 1 :]) / full

    @rule(op, local=local)
    def rows(*args):
        ins = tensors(args)
        yield from broadcast(ins)
        yield (P, *[R] * (len(ins) - 1)), P


for _op in (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
):
    elementwise_loss(_op)

for _op in (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
):
    elementwise_loss_backward(_op)


def _samples(x: Full):
    """Cuts of `x[n, c, i, ...]`, and of `target[n, i, ...]`, that leave the classes whole."""
    for d in range(x.ndim):
        if x.ndim > 1 and d != 1:
            yield S(d), S(d - (d > 1))


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(x, target, weight, reduction, ignore_index):
    """`out = -sum_n w[t[n]] * x[n, t[n]] / total`, over the `n` with `t[n] != ignore_index`

    The mean of blocks needs the total of all of them: only the sum leaves terms.
    """
    weights = [R] * (weight is not None)
    for cut, of_target in _samples(x):
        if reduction == NONE:
            yield (cut, of_target, *weights), (of_target, R)
        elif reduction == SUM:
            yield (cut, of_target, *weights), (P, P)
    yield (P, R, *weights), (P, R)


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(grad, x, target, weight, reduction, ignore_index, total_weight):
    """`dx[n, c] = -grad * w[c] / total` where `c == t[n] != ignore_index`, 0 elsewhere"""
    weights = [R] * (weight is not None)
    for cut, of_target in _samples(x):
        of_grad = of_target if reduction == NONE else R
        yield (of_grad, cut, of_target, *weights, R), cut
    yield (P, R, R, *weights, R), P
