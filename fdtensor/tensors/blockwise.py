"""Which optimizers of torch are right on blocks of parameters; the others are kept off them.

An optimizer that computes each element from the same element of parameter, gradient and state does
the same to blocks as to the whole. One that takes norms, means or products of matrices does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fdtensor.layouts.errors import FdtensorError
from fdtensor.tensors.dtensor import DTensor

__all__ = ["NOT_BY_ELEMENT", "remember"]

NOT_BY_ELEMENT = ("Adafactor", "LBFGS", "Muon")
"""The optimizers of `torch.optim` that are wrong on blocks."""

_BLOCKS: Any = WeakTensorKeyDictionary()
"""Local tensors that are a part of their tensor, and the types of those."""

_HOOKS: list[Any] = []


def remember(x: DTensor[Any]) -> None:
    """Keeps in mind the local tensors of `x` that are not all of it: `step` looks them up."""
    if all(x.type.local_shape(rank) == x.shape for rank in x.mesh.order):
        return
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_refuse))
    for leaf in x.comm.leaves(x.local):
        _BLOCKS[leaf] = x.type


def _refuse(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Raises before an optimizer steps on blocks that it would treat as whole parameters."""
    name = next((k.__name__ for k in type(optimizer).__mro__ if k.__name__ in NOT_BY_ELEMENT), None)
    if name is None:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    cut = [str(_BLOCKS[p]) for p in params if p in _BLOCKS]
    if cut:
        raise FdtensorError(
            f"{name} is not right on the {len(cut)} blocks of parameters that it was given: its "
            "update of an element depends on others.",
            blocks=", ".join(dict.fromkeys(cut)),
            hint=f"fdtensor.optim.{name} steps on DTensors in any layout."
            if name != "LBFGS"
            else "Replicate these parameters first: x.redistribute(mesh.layout()).",
        )
