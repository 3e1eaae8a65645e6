"""`mapped` and `frozen`: arguments with something else in place of each tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fdtensor.ops.graph import Var

__all__ = ["frozen", "mapped"]


def mapped(tree: Any, of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The arguments with `of(t)` for each tensor `t`."""
    if isinstance(tree, torch.Tensor):
        return of(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # of a class with names
        return type(tree)(*[mapped(entry, of) for entry in tree])
    if isinstance(tree, (tuple, list)):
        return type(tree)([mapped(entry, of) for entry in tree])
    if isinstance(tree, dict):
        return {key: mapped(entry, of) for key, entry in tree.items()}
    return tree


def frozen(tree: Any, of: Callable[[torch.Tensor], Var]) -> Any:
    """The arguments with values for tensors and tuples for lists."""
    if isinstance(tree, torch.Tensor):
        return of(tree)
    if isinstance(tree, (tuple, list)):
        return tuple([frozen(entry, of) for entry in tree])
    return tree
