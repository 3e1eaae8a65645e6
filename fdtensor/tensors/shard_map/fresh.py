"""`with_fresh_tensors`: a traced function in which each rank has for itself what it makes.

A tensor that is made of no other, such as zeros, is the same on all ranks, and is one tensor for
all of them: no rank can write to it what others do not. So a function that does it runs again,
which is another result only where it has written to tensors from around it: `WritesAround`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch.overrides import TorchFunctionMode

from fdtensor.layouts.torch_private import (
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_mapped,
    transforms_around,
    version_of,
    without_functions,
)
from fdtensor.ops.overlap import memory_of

__all__ = ["WritesAround", "is_of_shared", "own_of_each", "with_fresh_tensors"]


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
        self.depth = transforms_around()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        operands: Any = (args, kwargs)
        taken = any(isinstance(leaf, torch.Tensor) for leaf in optree.tree_leaves(operands))
        inside = transforms_around() >= self.depth  # elsewhere a recorder makes tensors of its own
        if taken or not inside or not isinstance(out, torch.Tensor):
            return out
        if func in (torch.zeros, torch.empty) and not out.requires_grad:
            return self.numbers.new_zeros(out.shape, dtype=out.dtype, device=out.device)
        return own_of_each(out, self.numbers)


class WritesAround(TorchFunctionMode):
    """Sees whether a function writes to a tensor that neither is one of these nor made in it."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.is_written = False
        self._is_own: dict[int, bool] = {}
        self._alive: list[torch.Tensor] = []  # so that no two have the same memory
        with without_functions():
            self._note(tensors, True)

    def _note(self, tree: Any, is_own: bool) -> list[torch.Tensor]:
        """The tensors of a tree, of whose memory it is known from now whether it is one's own."""
        tensors = [t for t in optree.tree_leaves(tree) if isinstance(t, torch.Tensor)]
        for t in tensors:
            self._is_own.setdefault(_memory(t), is_own or not _memory(t))
        self._alive += tensors
        return tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_functions():  # to those around, a look is a read
            operands = self._note((args, kwargs), False)
            before = [version_of(t) for t in operands]
        out = func(*args, **(kwargs or {}))
        with without_functions():
            for t, version in zip(operands, before, strict=True):
                if version_of(t) != version:
                    self.is_written |= not self._is_own[_memory(t)]
            self._note(out, True)
        return out


def _memory(tensor: torch.Tensor) -> int:
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    region = memory_of(tensor)
    return 0 if region is None else region.storage
