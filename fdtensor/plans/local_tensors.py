"""Local tensors: copies, memory of their own, empty blocks."""

from __future__ import annotations

import contextlib

import torch

from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import lazy_clone, transforms_active

__all__ = ["copied", "empty", "flat", "own", "plain"]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its bits as they are read: not a lazy conjugate or negative."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor


def own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own, which is copied when one of the two is written to."""
    if not transforms_active():
        with contextlib.suppress(RuntimeError):  # memory of others, such as that of numpy arrays
            return lazy_clone(tensor)
    return tensor.clone()


def copied(local: torch.Tensor) -> torch.Tensor:
    """A contiguous copy."""
    return local.clone(memory_format=torch.contiguous_format)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-d tensor as one element; others as they are."""
    return tensor if tensor.dim() else tensor.reshape(1)


def empty(type: TensorType, rank: int, like: torch.Tensor | torch.device) -> torch.Tensor:
    """A fresh tensor for what `rank` holds; for a rank outside, no elements (0-d: a zero)."""
    device = like if isinstance(like, torch.device) else like.device
    if type.mesh.coord(rank) is None:
        return torch.zeros((0,) * len(type.shape), dtype=type.dtype, device=device)
    return torch.empty(type.local_shape(rank), dtype=type.dtype, device=device)
