"""Losses: a term for each element or sample; `reduction` 0 gives all, 1 their mean, 2 their sum."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fdtensor.layouts.torch_private import schema_of
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import P, R, rule
from fdtensor.ops.notation.each import each
from fdtensor.ops.notation.formula import formula
from fdtensor.ops.notation.ops import on, overloads
from fdtensor.ops.rewrite import CROSS_ENTROPY_BACKWARD

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""The values of `reduction`."""


def _place(op: Any) -> int:
    return [argument.name for argument in schema_of(op).arguments].index("reduction")


def _operands(named: dict[str, Any]) -> tuple[list[Full | None], list[int]]:
    """The operands, None for those left out, and the number of the weight, if there is one."""
    ins = {name: value for name, value in named.items() if value is None or isinstance(value, Full)}
    return list(ins.values()), [i for i, name in enumerate(ins) if name == "weight"]


def _terms(ins: str, shapes: Sequence[tuple[int, ...]]) -> int:
    """The number of terms of a loss: one for each element, or for each sample of all classes."""
    return prod(torch.broadcast_shapes(*shapes) if ins[0] == "*" else shapes[0][:-1])


def loss(op: Any, ins: str, out: str, *more: str) -> None:
    """`out = sum_i w[i] * f(x[i], y[i], ...) / n`, with `n` the full number of terms"""
    place = _place(op)

    def local(at, *args):
        held, full = (
            _terms(ins, s) for s in zip(*((b.shape, b.full) for b in at.ins), strict=True)
        )
        if not held:  # of no terms some kernels give any number
            no_mean = not full and ins[0] == "*" and args[place] == MEAN
            value = float("nan") if no_mean else 0.0
            return [args[0].new_full(b.shape, value) for b in at.outs]
        result = op(*args)
        first, *others = result if isinstance(result, tuple) else (result,)
        return first * (held / full) if args[place] == MEAN else first, *others

    @each(op, local=local)
    def rows(op, named):
        outs = ", ".join((out if named["reduction"] == NONE else "", *more))
        operands, weights = _operands(named)
        yield from formula(f"{ins} -> {outs}", *operands, linear=weights)


def loss_backward(op: Any, ins: str, out: str, after: str) -> None:
    """`dx[i] = grad * w[i] * f'(x[i], y[i], ...) / n`, with `n` the full number of terms"""
    place = _place(op)

    def local(at, *args):
        if args[place] != MEAN:
            return op(*args)
        full = _terms(ins, [b.full for b in at.ins[1:]])
        return op(*args[:place], SUM, *args[place + 1 :]) / full

    @each(op, local=None if op in _BY_TOTAL else local)
    def rows(op, named):
        operands, weights = _operands(named)
        of_grad = out if named["grad_output"].ndim else ""
        pairs = [*formula(f"{of_grad}, {ins} -> {after}", *operands, linear=[0, *weights])]
        if op in _BY_TOTAL:  # of x only the shape is read
            pairs += [((p, P, *[R] * sum(t is not None for t in operands[2:])), p) for p in (R, P)]
            if named["reduction"] != MEAN:  # nor is the total
                pairs += [((*before[:-1], P), after) for before, after in pairs]
        yield from pairs
        if op is aten.mse_loss_backward.default:
            yield (R, P, P), P


_BY_TOTAL = overloads("nll_loss_backward nll_loss2d_backward")
"""The ops that take the number to divide by."""

for _name in ("mse", "smooth_l1", "huber", "soft_margin"):
    loss(getattr(aten, f"{_name}_loss").default, "*, *", "*")
    loss_backward(getattr(aten, f"{_name}_loss_backward").default, "*, *", "*", "*")

loss(aten.binary_cross_entropy.default, "*, *, *", "*")
loss_backward(aten.binary_cross_entropy_backward.default, "*, *, *", "*", "*")
loss(aten.binary_cross_entropy_with_logits.default, "*, *, *, *", "*")
loss(aten.multi_margin_loss.default, "n C, n, C", "n")
loss_backward(aten.multi_margin_loss_backward.default, "n C, n, C", "n", "n C")
loss(aten.multilabel_margin_loss_forward.default, "n C, n C", "n", "n C")
loss_backward(aten.multilabel_margin_loss_backward.default, "n C, n C, n C", "n", "n C")

for _op in _BY_TOTAL:
    loss_backward(_op, "n C *, n *, C,", "n *", "n C *")


@rule(CROSS_ENTROPY_BACKWARD)
def cross_entropy_backward(
    grad_output, out, target, weight, reduction, ignore_index, total_weight, dtype
):
    """`dx[n, c] = dy[n, c] - exp(out[n, c]) * sum_d dy[n, d]`, with `dy` that of `nll_loss`"""
    of_grad = "n *" if reduction == NONE else ""
    operands = grad_output, out, target, weight, total_weight
    yield from formula(f"{of_grad}, n C *, n *, C, -> n C *", *operands, linear=[0, 3])


@on("nll_loss_forward nll_loss2d_forward")
def nll_loss(x, target, weight, reduction, ignore_index):
    """`out = -sum_n w[t[n]] * x[n, t[n]] / total`, over the `n` with `t[n] != ignore_index`

    The mean of blocks needs the total of all of them: only the sum leaves terms.
    """
    if reduction != MEAN:
        out = "n *" if reduction == NONE else ""
        yield from formula(f"n C *, n *, C -> {out}, ", x, target, weight, linear=[2])
    yield (P, R) if weight is None else (P, R, R), (P, R)
