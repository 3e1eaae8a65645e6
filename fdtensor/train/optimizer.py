"""The numbers of AdamW for the GPT, and clipping by global norm as a plain function.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), arXiv:1711.05101.
Loshchilov and Hutter, "SGDR" (2016), arXiv:1608.03983, has the schedule.
Pascanu et al., "On the difficulty of training recurrent neural networks" (2013), arXiv:1211.5063.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from fdtensor import optim

__all__ = ["AdamW", "clipped", "global_norm"]

Tensors = Mapping[str, torch.Tensor]


@attrs.frozen
class AdamW:
    """The numbers of AdamW. Vectors (biases and norms) do not decay."""

    lr: float = 1e-3
    warmup: int = 10
    """The rate grows linearly over this many steps."""
    until: int | None = None
    """Afterwards it falls to a tenth, along half a cosine, by this step; None: it stays."""
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    decay: float = 0.1
    clip: float = 1.0
    """The largest norm of all gradients together."""

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if self.until is None or step < self.warmup:
            return self.lr * min(1.0, (step + 1) / self.warmup)
        fallen = min(1.0, (step - self.warmup) / max(1, self.until - self.warmup))
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * fallen))

    def optimizer(self, params: Mapping[str, Any]) -> optim.Optimizer:
        """The optimizer of parameters of these shapes."""
        decay = {name: self.decay if len(p.shape) > 1 else 0.0 for name, p in params.items()}
        return optim.AdamW(betas=self.betas, eps=self.eps, weight_decay=decay)


def global_norm(tensors: Tensors) -> torch.Tensor:
    """The norm of all numbers in all tensors, 0-d."""
    return torch.stack([x.square().sum() for x in tensors.values()]).sum().sqrt()


def clipped(grads: Tensors, limit: float) -> dict[str, torch.Tensor]:
    """The gradients, scaled down together where their global norm is over the limit."""
    scale = (limit / (global_norm(grads) + 1e-6)).clamp(max=1.0)
    return {name: g * scale for name, g in grads.items()}
