"""`unwrapped`: the tensors that are recorded, below functionalization and transforms."""

from __future__ import annotations

import torch

from fdtensor.layouts.torch_private import (
    get_unwrapped,
    is_functional_tensor,
    is_functorch_wrapped_tensor,
    of_functional_tensor,
    sync,
)

__all__ = ["innermost", "unwrapped"]


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that stands for a functional one, with all that was written to it."""
    if not is_functional_tensor(tensor):
        return tensor
    sync(tensor)
    return of_functional_tensor(tensor)


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that is recorded for one inside of transforms."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return unwrapped(tensor)
