"""One step of training, as a plain torch function of parameters, state and tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import grad_and_value

from fdtensor.train.model import Model, Params, Pin
from fdtensor.train.optimizer import AdamW, clipped

__all__ = ["TrainStep", "training"]

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
    optimizer = numbers.optimizer(dict(module.named_parameters()))

    def loss_of(params: Params, tokens: torch.Tensor) -> torch.Tensor:
        if precision is not None:
            params = {name: p.to(precision) for name, p in params.items()}
        logits = model.logits(module, params, tokens[:, :-1])
        if precision is not None:
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def train_step(params: Params, state: State, tokens: torch.Tensor, rate: Any):
        grads, loss = grad_and_value(loss_of)(params, tokens)
        clip = clipped(grads, numbers.clip)
        updated, state = optimizer.step(params, clip, state, lr=rate)
        return updated, state, loss

    return train_step
