"""AdamW and clipping by global norm, as plain functions of dicts of tensors.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), arXiv:1711.05101.
Pascanu et al., "On the difficulty of training recurrent neural networks" (2013), arXiv:1211.5063.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import attrs
import torch

__all__ = ["AdamW", "State", "adamw", "clipped", "fresh", "global_norm"]

Tensors = Mapping[str, torch.Tensor]


class State(TypedDict):
    """What AdamW remembers: steps so far (0-d), and running means of gradients and squares."""

    step: torch.Tensor
    mean: dict[str, torch.Tensor]
    square: dict[str, torch.Tensor]


@attrs.frozen
class AdamW:
    """The numbers of AdamW. Vectors (biases and norms) do not decay."""

    lr: float = 1e-3
    warmup: int = 10
    """The rate grows linearly over this many steps, then stays."""
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    decay: float = 0.1
    clip: float = 1.0
    """The largest norm of all gradients together."""


def fresh(params: Tensors) -> State:
    """The state before the first step."""
    dtype = next(iter(params.values())).dtype
    return {
        "step": torch.zeros((), dtype=dtype),
        "mean": {name: torch.zeros_like(p) for name, p in params.items()},
        "square": {name: torch.zeros_like(p) for name, p in params.items()},
    }


def global_norm(tensors: Tensors) -> torch.Tensor:
    """The norm of all numbers in all tensors, 0-d."""
    return torch.stack([x.square().sum() for x in tensors.values()]).sum().sqrt()


def clipped(grads: Tensors, limit: float) -> dict[str, torch.Tensor]:
    """The gradients, scaled down together where their global norm is over the limit."""
    scale = (limit / (global_norm(grads) + 1e-6)).clamp(max=1.0)
    return {name: g * scale for name, g in grads.items()}


def adamw(
    params: Tensors, grads: Tensors, state: State, numbers: AdamW
) -> tuple[dict[str, torch.Tensor], State]:
    """The parameters and the state after one step; the gradients come clipped or not.

    `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g^2`, and with both corrected for their start
    from 0, `p - rate (m / (sqrt(v) + eps) + decay p)`.
    """
    b1, b2 = numbers.betas
    step = state["step"] + 1
    rate = numbers.lr * (step / numbers.warmup).clamp(max=1.0)
    unbias1, unbias2 = 1 - b1**step, 1 - b2**step
    mean = {n: b1 * state["mean"][n] + (1 - b1) * g for n, g in grads.items()}
    square = {n: b2 * state["square"][n] + (1 - b2) * g.square() for n, g in grads.items()}
    updated = {}
    for name, p in params.items():
        change = (mean[name] / unbias1) / ((square[name] / unbias2).sqrt() + numbers.eps)
        if p.dim() > 1:
            change = change + numbers.decay * p
        updated[name] = p - rate * change
    return updated, {"step": step, "mean": mean, "square": square}
