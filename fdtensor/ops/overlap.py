"""The memory of functional tensors, and which tensors overlap in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.torch_private import (
    get_unwrapped,
    is_functional_tensor,
    is_gradtrackingtensor,
    storage_number,
)

__all__ = ["alias_among", "elements_overlap", "is_expanded", "memory_of", "overlap_partly"]

_C: Any = torch  # what torch does not declare


@attrs.frozen
class MemoryRegion:
    """The elements of a tensor in a storage: shape, strides and offset, in elements."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: Any  # an int, or a symbol where the sizes of a recording are
    itemsize: int

    @property
    def bytes(self) -> tuple[int, int]:
        """The first byte, and the one after the last, of a dense tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return self.start * self.itemsize, (self.start + count) * self.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill one range of memory, each once, in any order of the dims."""
        step = 1
        for stride, size in sorted(
            (s, n) for s, n in zip(self.strides, self.shape, strict=True) if n != 1
        ):
            if stride != step:
                return False
            step *= size
        return True


def memory_of(tensor: torch.Tensor) -> MemoryRegion | None:
    """The region of a functional tensor; None under vmap, and for other or empty tensors."""
    while is_gradtrackingtensor(tensor):
        tensor = get_unwrapped(tensor)
    if not is_functional_tensor(tensor) or 0 in tensor.shape:
        return None
    return MemoryRegion(
        storage_number(tensor.untyped_storage()),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.storage_offset(),
        tensor.itemsize,
    )


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether a dim of several elements has stride 0, which torch checks before a write."""
    region = memory_of(tensor)
    return region is not None and any(
        stride == 0 and size > 1 for stride, size in zip(region.strides, region.shape, strict=True)
    )


def elements_overlap(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory: by `expand`, or as windows that overlap."""
    region, reach = memory_of(tensor), 0
    dims = [] if region is None else sorted(zip(region.strides, region.shape, strict=True))
    for stride, size in dims:
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def overlap_partly(target: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two dense tensors share memory, and are not the same elements in the same order."""
    a, b = memory_of(target), memory_of(other)
    if a is None or b is None or a.storage != b.storage or not (a.is_dense and b.is_dense):
        return False
    (start, stop), (start_b, stop_b) = a.bytes, b.bytes
    if (start, stop) == (start_b, stop_b):
        return a.strides != b.strides
    return start < stop_b and start_b < stop


def alias_among(tensors: Sequence[torch.Tensor], of: torch.Tensor) -> torch.Tensor:
    """The last one that is the same elements of one memory; raises `TraceError` for none."""

    def place(t: torch.Tensor) -> Any:
        return t.shape, t.stride(), t.storage_offset(), t.dtype, storage_number(t.untyped_storage())

    sought = place(of)
    for t in reversed(tensors):
        if place(t) == sought:
            return t
    raise TraceError(
        f"a tensor of shape {tuple(of.shape)} is read that no op of the traced function has made.",
        line=user_line() or "not known",
        hint="It was kept from elsewhere, as from inside of a vmap: return it from there.",
    )
