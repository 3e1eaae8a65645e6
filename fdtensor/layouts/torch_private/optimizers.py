"""Private names of torch for optimizers and gradient scalers: 2.11 to 2.13."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import torch
from torch.optim import _muon

__all__ = ["NEWTON_SCHULZ", "ScalerWithHook", "has_init_group", "init_group", "newton_schulz"]

NEWTON_SCHULZ = "_zeropower_via_newtonschulz"
"""The name of the function below in the module of `torch.optim.Muon`."""

newton_schulz: Any = getattr(_muon, NEWTON_SCHULZ)
"""About the nearest orthogonal matrix, by the iteration of Newton and Schulz."""


def has_init_group(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer can make its state without a step."""
    return hasattr(kind, "_init_group")


def init_group(optimizer: Any) -> Any:
    """The method of an optimizer that makes the state of a group of parameters."""
    return optimizer._init_group


class ScalerWithHook(torch.amp.GradScaler):
    """`torch.amp.GradScaler` with a public name for what it does to gradients before a step."""

    def unscaled(self, flags: dict[torch.device, torch.Tensor]) -> dict[torch.device, torch.Tensor]:
        """The flags, by device, that say whether a gradient is infinite or nan."""
        return flags

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        return self.unscaled(super()._unscale_grads_(*args, **kwargs))
