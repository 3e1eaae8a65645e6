"""`Memory`: the most bytes that the tensors of a rank hold at once, counted."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Memory"]

_PATIENCE = 1.0
"""The seconds that a busy thread of gloo may keep a work that is done."""


class Memory(TorchDispatchMode):
    """The most bytes that live tensors held at once, after any op."""

    def __init__(self, given: Iterable[torch.Tensor | None], announced: int) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most, self.announced = 0, announced
        self._see(given)

    def _see(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        now = self._held()
        end = time.monotonic() + _PATIENCE
        while now > self.announced and time.monotonic() < end:
            time.sleep(0.01)
            now = self._held()
        self.most = max(self.most, now)

    def _held(self) -> int:
        self.live = {key: held for key, held in self.live.items() if not held[0].expired()}
        return sum(nbytes for _, nbytes in self.live.values())

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        out = op(*args, **(kwargs or {}))
        self._see(tree_leaves(out))
        return out
