"""`refuse_hidden`: what a function returns must show its tensors to pytrees."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.words import a_kind
from fdtensor.ops.transparent import has_values

__all__ = ["refuse_hidden"]

_DEEPEST, _MOST = 4, 4096
"""How far, and at how many objects, is looked inside of one."""

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def refuse_hidden(name: str, leaves: Sequence[Any]) -> None:
    """Raises `TraceError` where a leaf of the result of a function holds tensors of the recording.

    They have no values: such a leaf is a container that pytrees do not look into.
    """
    for leaf in leaves:
        if isinstance(leaf, (torch.Tensor, *_PLAIN)) or all(map(has_values, _tensors_in(leaf))):
            continue
        raise TraceError(
            f"{name} returns {a_kind(leaf)}, and the tensors in it are not seen.",
            hint="Return a tuple, list, dict, named tuple or dataclass, or register the kind: "
            "torch.utils._pytree.register_pytree_node, or optree's in the namespace 'fdtensor'.",
        )


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors to which an object leads."""
    seen: set[int] = {id(value)}
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        within = gc.get_referents(*level)
        level = []
        for each in within:
            if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType)):
                continue
            seen.add(id(each))
            if isinstance(each, torch.Tensor):
                yield each
            elif len(seen) < _MOST:
                level.append(each)
