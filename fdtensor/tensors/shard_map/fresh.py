"""`with_fresh_tensors`: a traced function in which each rank has for itself what it makes.

A tensor that is made of no other, such as zeros, is the same on all ranks, and is one tensor for
all of them: no rank can write to it what others do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch.overrides import TorchFunctionMode

from fdtensor.layouts.torch_private import is_mapped

__all__ = ["is_of_shared", "own_of_each", "with_fresh_tensors"]


def is_of_shared(error: Exception, ranks: int) -> bool:
    """Whether `vmap` refuses a write of what differs to a tensor that is one for all ranks."""
    if "is not possible because there exists a Tensor" in str(error):
        return True
    shapes = re.search(
        r"with shape \D*(.*?)[])]+ doesn't match the .* shape \D*(.*)[])]", str(error)
    )
    if shapes is None:
        return False
    kept, new = ([n.strip() for n in text.split(",") if n.strip()] for text in shapes.groups())
    return new == [str(ranks), *kept]


def own_of_each(tensor: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The tensor, as one that each rank has for itself."""
    if is_mapped(tensor, numbers):
        return tensor
    return torch.where(numbers >= 0, tensor, tensor)


def with_fresh_tensors(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a rank's number and tensors, in which ranks share no tensor that it makes."""

    def own(numbers: torch.Tensor, *tensors: torch.Tensor) -> Any:
        with _Fresh(numbers):
            return f(numbers, *tensors)

    return own


class _Fresh(TorchFunctionMode):
    """Gives each rank a tensor of its own where one is made of no other."""

    def __init__(self, numbers: torch.Tensor) -> None:
        super().__init__()
        self.numbers = numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        operands: Any = (args, kwargs)
        taken = any(isinstance(leaf, torch.Tensor) for leaf in optree.tree_leaves(operands))
        if taken or not isinstance(out, torch.Tensor):
            return out
        if func in (torch.zeros, torch.empty) and not out.requires_grad:
            return self.numbers.new_zeros(out.shape, dtype=out.dtype, device=out.device)
        return own_of_each(out, self.numbers)
