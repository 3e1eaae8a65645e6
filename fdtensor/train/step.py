"""One step of training, as a plain torch function of parameters, state and tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import grad_and_value

from fdtensor.train.model import Model, Params, Pin
from fdtensor.train.optimizer import AdamW, clipped

__all__ = ["TrainStep", "computing", "mean_loss", "training"]

State = dict[str, dict[str, torch.Tensor]]

TrainStep = Callable[[Params, State, torch.Tensor, Any], tuple[Params, State, torch.Tensor]]


def training(
    model: Model,
    numbers: AdamW,
    pin: Pin | None = None,
    precision: torch.dtype | None = None,
) -> TrainStep:
    """The function `train_step(params, state, tokens, rate) -> (params, state, loss)`, pure.

    Tokens have shape (batch, length + 1); the rate is that of learning, a number or a 0-d tensor.
    The loss is the mean over all predictions, in nats. With `precision` the model computes in that
    dtype, while parameters, gradients, loss and optimizer stay as they are.
    """
    module = model.module(pin)
    run = computing(functools.partial(model.logits, module), precision)
    optimizer = numbers.optimizer(dict(module.named_parameters()))

    def loss_of(params: Params, tokens: torch.Tensor) -> torch.Tensor:
        return mean_loss(run(params, tokens[:, :-1]), tokens[:, 1:])

    def train_step(params: Params, state: State, tokens: torch.Tensor, rate: Any):
        grads, loss = grad_and_value(loss_of)(params, tokens)
        clip = clipped(grads, numbers.clip)
        updated, state = optimizer.step(params, clip, state, lr=rate)
        return updated, state, loss

    return train_step


def computing(
    run: Callable[[Params, torch.Tensor], torch.Tensor], precision: torch.dtype | None
) -> Callable[[Params, torch.Tensor], torch.Tensor]:
    """A model, or a part of one, that computes in `precision`; None for that of its parameters."""
    if precision is None:
        return run

    def cast(params: Params, x: torch.Tensor) -> torch.Tensor:
        return run({name: p.to(precision) for name, p in params.items()}, x)

    return cast


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all predictions, of halves in float32."""
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())
