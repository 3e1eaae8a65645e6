"""Losses that read values, as functions that do not, so that they have programs.

`gaussian_nll_loss` checks whether a variance is negative; `ctc_loss` sizes the tensor that it saves
for the backward by the longest target: here that is as wide as the targets may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fdtensor.ops.notation.core import rule
from fdtensor.ops.notation.formula import formula
from fdtensor.ops.notation.ops import tensors
from fdtensor.ops.own_ops import own_op
from fdtensor.ops.transparent import recorded_as
from fdtensor.ops.value_checks import require

aten = torch.ops.aten

Tensor = torch.Tensor

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda loss: loss,
    "mean": torch.mean,
    "sum": torch.sum,
}


@recorded_as(F.gaussian_nll_loss)
def gaussian_nll_loss(input, target, var, full=False, eps=1e-6, reduction="mean"):
    """`out[i] = (log(var[i]) + (x[i] - y[i])^2 / var[i]) / 2`, which a clamp of `var` passes"""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    require(~(var < 0), "value of the variance of gaussian_nll_loss, 0 or more")
    var = var.clamp(min=eps).detach() + (var - var.detach())
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    return _REDUCTIONS[reduction](loss + 0.5 * math.log(2 * math.pi) if full else loss)


def _ctc_empty(log_probs, targets, *_):
    steps, samples, _ = log_probs.shape
    alpha = log_probs.new_empty(samples, steps, 2 * targets.shape[1] + 1)
    return log_probs.new_empty(samples), alpha


def _ctc(log_probs, targets, input_lengths, target_lengths, *rest):
    out, alpha = _ctc_empty(log_probs, targets)
    if not out.numel():  # the kernels ask for samples
        return out, alpha
    lengths = input_lengths, target_lengths
    out, known = aten._ctc_loss.Tensor(log_probs, targets, *lengths, *rest)
    steps, labels = (torch.arange(n, device=known.device) for n in alpha.shape[1:])
    past = steps.unsqueeze(1) >= input_lengths.reshape(-1, 1, 1)
    past = past | (labels > 2 * target_lengths.reshape(-1, 1, 1))
    known = F.pad(known, (0, alpha.shape[2] - known.shape[2]))
    return out, known.masked_fill(past, -math.inf)  # which kernels do not initialize


def _ctc_backward(grad, log_probs, *rest):
    if not grad.numel():
        return torch.empty_like(log_probs)
    return aten._ctc_loss_backward.Tensor(grad, log_probs, *rest)


_TAKEN = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
_CHOSEN = "int blank, bool zero_infinity"
CTC = own_op(f"ctc_loss({_TAKEN}, {_CHOSEN}) -> (Tensor, Tensor)", _ctc, _ctc_empty)
"""The losses of rows, and what their derivative needs."""

CTC_BACKWARD = own_op(
    f"ctc_loss_backward(Tensor grad, {_TAKEN}, Tensor out, Tensor alpha, {_CHOSEN}) -> Tensor",
    _ctc_backward,
    lambda _grad, log_probs, *_: torch.empty_like(log_probs),
)


@rule(CTC)
def ctc_rows(log_probs, targets, *lengths):
    """`out[n] = -log P(targets[n] | log_probs[:, n])`, and `alpha[n, t, s]` for the backward"""
    yield from formula("T n C, n S, n, n -> n, n T A", log_probs, targets, *lengths[:2], linear=[])


@rule(CTC_BACKWARD)
def ctc_backward_rows(*args):
    """`dx[t, n, c] = grad[n] * d out[n] / d log_probs[t, n, c]`"""
    text = "n, T n C, n S, n, n, n, n T A -> T n C"
    yield from formula(text, *tensors(args), linear=[0])


class _Ctc(torch.autograd.Function):
    """The two ops, as a function that has a derivative."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return CTC(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.blank, ctx.zero_infinity = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:  # type: ignore[override]
        chosen = ctx.blank, ctx.zero_infinity
        dx = CTC_BACKWARD(grad, *ctx.saved_tensors, *chosen)
        return dx, None, None, None, None, None


@recorded_as(F.ctc_loss)
def ctc_loss(
    log_probs,
    targets,
    input_lengths,
    target_lengths,
    blank=0,
    reduction="mean",
    zero_infinity=False,
):
    """`out[n] = -log P(targets[n] | log_probs[:, n])`, for targets in a table"""
    sizes = input_lengths, target_lengths
    if log_probs.ndim != 3 or targets.ndim != 2:
        return F.ctc_loss(log_probs, targets, *sizes, blank, reduction, zero_infinity)
    lengths = [
        n if isinstance(n, Tensor) else torch.tensor(n, device=log_probs.device) for n in sizes
    ]
    out, _ = _Ctc.apply(log_probs, targets, *lengths, blank, zero_infinity)  # type: ignore[misc]
    if zero_infinity:
        out = out.masked_fill(out == math.inf, 0)
    if reduction == "mean":
        out = out / lengths[1].clamp(min=1)
    return _REDUCTIONS[reduction](out)
