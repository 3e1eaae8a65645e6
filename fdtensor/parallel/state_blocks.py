"""`state_blocks`: the blocks that a rank has of the state of a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.parallel.module_layouts import identity
from fdtensor.plans.collectives import local_step
from fdtensor.plans.planner import plan

__all__ = ["state_blocks"]


def state_blocks(
    state: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout], rank: int
) -> dict[str, torch.Tensor]:
    """The blocks of a rank: those of tensors that are one are one."""
    blocks: dict[Any, torch.Tensor] = {}
    for name, tensor in state.items():
        key = identity(tensor)
        if key not in blocks:
            blocks[key] = _block(tensor, layouts[name], rank)
    return {name: blocks[identity(tensor)] for name, tensor in state.items()}


def _block(tensor: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    whole = TensorType(tuple(tensor.shape), tensor.dtype, layout.mesh.layout())
    local = tensor.detach().clone() if whole.layout == layout else tensor.detach()
    for step in plan(whole, whole.with_layout(layout)).steps:
        local = local_step(step, rank, local)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(local, requires_grad=tensor.requires_grad)
    return local
