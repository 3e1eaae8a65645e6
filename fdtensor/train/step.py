"""One step of training, as a plain torch function of parameters, state and tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import functional_call, grad_and_value

from fdtensor.train.gpt import GPT, Pin, Size
from fdtensor.train.optimizer import AdamW, clipped

__all__ = ["Params", "TrainStep", "training"]

Params = dict[str, torch.Tensor]
State = dict[str, dict[str, torch.Tensor]]

TrainStep = Callable[[Params, State, torch.Tensor, Any], tuple[Params, State, torch.Tensor]]


def training(size: Size, numbers: AdamW, pin: Pin | None = None) -> TrainStep:
    """The function `train_step(params, state, tokens, rate) -> (params, state, loss)`, pure.

    Tokens have shape (batch, length + 1); the rate is that of learning, a number or a 0-d tensor.
    The loss is the mean over all predictions, in nats.
    """
    with torch.device("meta"):  # only the shape of the computation: the numbers are passed in
        model = GPT(size, pin)
    optimizer = numbers.optimizer(dict(model.named_parameters()))

    def loss_of(params: Params, tokens: torch.Tensor) -> torch.Tensor:
        logits = functional_call(model, params, (tokens[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def train_step(params: Params, state: State, tokens: torch.Tensor, rate: Any):
        grads, loss = grad_and_value(loss_of)(params, tokens)
        clip = clipped(grads, numbers.clip)
        updated, state = optimizer.step(params, clip, state, lr=rate)
        return updated, state, loss

    return train_step
