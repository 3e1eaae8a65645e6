"""Tensors that are the same along mesh axes while a module runs: `watched`, `mark`, `same_along`.

Inputs of the module are marked, by their types or by what the caller promises, and what is computed
of them is followed op by op: it is the same along an axis where all of its operands that are known
are. What no input leads to, such as parameters and what is made of them alone, is not known.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import (
    TorchDispatchMode,
    functional_collectives,
    storage_number,
    uncompiled,
)
from fdtensor.ops.transparent import recording

__all__ = [
    "Along",
    "known",
    "leave",
    "mark",
    "mark_operands",
    "same_along",
    "storage_of",
    "watched",
    "watching",
]

Along = frozenset[tuple[Mesh, str]] | None
"""The axes of which all ranks hold the same tensor; None where it was promised for all."""

_DIFFERENT = {
    functional_collectives.reduce_scatter_tensor.default,
    functional_collectives.reduce_scatter_tensor_coalesced.default,
    functional_collectives.all_to_all_single.default,
}
"""Collectives that give each rank something else."""


@uncompiled
class _Known(TorchDispatchMode):
    """The mesh axes along which memories are the same, kept up with the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        # a number means a memory only while there is a reference to it
        self.table: dict[int, tuple[StorageWeakRef, Along]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def put(self, tensor: torch.Tensor, along: Along) -> None:
        storage = _storage(tensor)
        if storage is not None:
            self.table[storage_number(storage)] = StorageWeakRef(storage), along

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if recording():
            return out
        known = [held[1] for t in _tensors((args, tuple(kwargs.values()))) if (held := self.get(t))]
        if known:
            along = frozenset() if func in _DIFFERENT else _common(known)
            for tensor in _tensors((out,)):
                self.put(tensor, along)
        return out

    def get(self, tensor: torch.Tensor) -> tuple[StorageWeakRef, Along] | None:
        storage = _storage(tensor)
        return None if storage is None else self.table.get(storage_number(storage))


class _Here(threading.local):
    known: _Known | None = None


_HERE = _Here()


def watching() -> bool:
    """Whether a module is being watched on this thread."""
    return _HERE.known is not None


def watched() -> bool:
    """Begins to watch on this thread, until `leave`; False where it was watched before."""
    if _HERE.known is not None:
        return False
    here = _Known()
    here.__enter__()
    _HERE.known = here
    return True


def leave() -> None:
    """Ends what `watched` has begun."""
    here, _HERE.known = _HERE.known, None
    if here is not None:
        here.__exit__(None, None, None)


def mark(tensors: Iterable[torch.Tensor], type: TensorType | None, own: bool = False) -> None:
    """Says where tensors are the same: as their type says, by a promise, or, `own`, nowhere."""
    here = _HERE.known
    if here is None:
        return
    along: Along = frozenset() if own else None
    if type is not None:
        places = zip(type.mesh.axes, type.layout.placements, strict=True)
        along = frozenset((type.mesh, a) for a, p in places if isinstance(p, Replicate))
    for tensor in tensors:
        here.put(tensor, along)


def mark_operands(values: Sequence[Any], types: Sequence[TensorType], comm: Any) -> None:
    """Marks the operands of a program by their types, but for leaves that want gradients.

    Those are parameters, unless the module was given them.
    """
    if _HERE.known is None:
        return
    for value, type in zip(values, types, strict=True):
        leaves = comm.leaves(value)
        mark([t for t in leaves if not (t.is_leaf and t.requires_grad) or known(t)], type)


def known(tensor: torch.Tensor) -> bool:
    """Whether anything is known of a tensor."""
    return _HERE.known is not None and _HERE.known.get(tensor) is not None


def same_along(tensor: torch.Tensor, mesh: Mesh, axis: str) -> bool:
    """Whether all ranks of an axis are known to hold this tensor."""
    held = _HERE.known and _HERE.known.get(tensor)
    return held is not None and (held[1] is None or (mesh, axis) in held[1])


def storage_of(tensor: torch.Tensor) -> int | None:
    """The number of the memory that a tensor is in; None for one that has none."""
    storage = _storage(tensor)
    return None if storage is None else storage_number(storage)


def _storage(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, or wrapped around another
        return None


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for entry in tree:
        if isinstance(entry, torch.Tensor):
            yield entry
        elif isinstance(entry, (tuple, list)):
            yield from _tensors(entry)


def _common(each: Sequence[Along]) -> Along:
    """The axes that are in all of them."""
    sets = [along for along in each if along is not None]
    return frozenset.intersection(*sets) if sets else None
