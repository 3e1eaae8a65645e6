"""Losses: a term for each element or sample; `reduction` 0 gives all, 1 their mean, 2 their sum."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fdtensor.notation.core import P, R, rule
from fdtensor.notation.formula import formula
from fdtensor.rules.pointwise import tensors

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""The values of `reduction`."""


def _place(op: Any) -> int:
    return [a.name for a in op._schema.arguments].index("reduction")


def _terms(ins: str, shapes: Sequence[tuple[int, ...]]) -> int:
    """How many terms a loss has: one for each element, or for each sample of all classes."""
    return prod(torch.broadcast_shapes(*shapes) if ins[0] == "*" else shapes[0][:-1])


def loss(op: Any, ins: str, out: str, *more: str) -> None:
    """`out = sum_i f(x[i], y[i], ...) / n`, with `n` the full number of terms"""
    place = _place(op)

    def local(at, *args):
        held, full = (_terms(ins, s) for s in zip(*((b.shape, b.full) for b in at.ins)))
        if not held:  # of nothing some kernels give anything
            return [args[0].new_zeros(b.shape) for b in at.outs]
        made = op(*args)
        first, *others = made if isinstance(made, tuple) else (made,)
        return first * (held / full) if args[place] == MEAN else first, *others

    @rule(op, local=local)
    def rows(*args):
        outs = ", ".join((out if args[place] == NONE else "", *more))
        yield from formula(f"{ins} -> {outs}", *tensors(args), linear=[])


def loss_backward(op: Any, ins: str, out: str, after: str) -> None:
    """`dx[i] = grad * f'(x[i], y[i], ...) / n`, with `n` the full number of terms"""
    place = _place(op)

    def local(at, *args):
        if args[place] != MEAN:
            return op(*args)
        full = _terms(ins, [b.full for b in at.ins[1:]])
        return op(*args[:place], SUM, *args[place + 1 :]) / full

    @rule(op, local=None if op in _BY_TOTAL else local)
    def rows(grad, *args):
        of_grad = out if grad.ndim else ""
        yield from formula(f"{of_grad}, {ins} -> {after}", grad, *tensors(args), linear=[0])


_BY_TOTAL = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
"""Those that are told what to divide by."""

for _name in (
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "binary_cross_entropy",
):
    loss(getattr(aten, _name).default, "*, *, *", "*")
    loss_backward(getattr(aten, f"{_name}_backward").default, "*, *, *", "*", "*")

loss(aten.binary_cross_entropy_with_logits.default, "*, *, *, *", "*")
loss(aten.multi_margin_loss.default, "n C, n, C", "n")
loss_backward(aten.multi_margin_loss_backward.default, "n C, n, C", "n", "n C")
loss(aten.multilabel_margin_loss_forward.default, "n C, n C", "n", "n C")
loss_backward(aten.multilabel_margin_loss_backward.default, "n C, n C, n C", "n", "n C")

for _op in _BY_TOTAL:
    loss_backward(_op, "n C *, n *, C,", "n *", "n C *")


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(x, target, weight, reduction, ignore_index):
    """`out = -sum_n w[t[n]] * x[n, t[n]] / total`, over the `n` with `t[n] != ignore_index`

    The mean of blocks needs the total of all of them: only the sum leaves terms.
    """
    if reduction != MEAN:
        out = "n *" if reduction == NONE else ""
        yield from formula(f"n C *, n *, C -> {out}, ", x, target, weight, linear=[])
    yield (P, R) if weight is None else (P, R, R), (P, R)
