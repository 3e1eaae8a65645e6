"""`tensors_by_name` and `first_names`: the tensors of a module, of which some have more names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["first_names", "tensors_by_name"]


def tensors_by_name(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers by all their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def first_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For each name the first one of the same tensor."""
    firsts: dict[int, str] = {}
    return {name: firsts.setdefault(id(t), name) for name, t in tensors.items()}
