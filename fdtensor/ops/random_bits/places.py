"""`Places`: the elements of a block, as their numbers in the full tensor, counted row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from math import prod

import numpy as np
import torch

from fdtensor.layouts.blocks import Box, Intervals, length, whole
from fdtensor.layouts.remembered import remembered

__all__ = ["Places"]

_Dim = tuple[Intervals, int]
"""The indices held in a dim, and how far apart neighbors are."""


@dataclasses.dataclass(frozen=True)  # torch.compile makes no frozen ones of attrs
class Places:
    """A block of a tensor of `shape`: the indices held in each dim, as intervals.

    The number of an element counts all elements before it: `sum_d i[d] * prod(shape[d + 1:])`.
    """

    shape: tuple[int, ...]
    box: Box

    @staticmethod
    def all(shape: tuple[int, ...]) -> Places:
        """Every element."""
        return Places(shape, tuple([whole(size) for size in shape]))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the block."""
        return tuple([length(held) for held in self.box])

    @property
    def count(self) -> int:
        """The number of elements of the block."""
        return prod(self.local_shape)

    @property
    def is_whole(self) -> bool:
        """Whether it has every element."""
        return self == Places.all(self.shape)

    @property
    def past_32_bits(self) -> bool:
        """Whether a number may need more than 32 bits."""
        return prod(self.shape) > 1 << 32

    def runs(self, most: int) -> Iterator[int | np.ndarray]:
        """The numbers in order, up to `most` at a time: as an array, or as their first one.

        It is the first one where all are consecutive: `most` of them, and in the end the rest.
        """
        if not self.count:
            return
        base, dims = _merged(self)
        if not dims:
            yield base
            return
        if len(dims) == 1 and len(dims[0][0]) == 1 and dims[0][1] == 1:
            ((start, stop),) = dims[0][0]
            for first in range(start, stop, most):
                yield base + first
            return
        yield from _arrays(base, dims, most)

    def block(self, full: torch.Tensor) -> torch.Tensor:
        """The block of a tensor of `shape`."""
        for d, part in enumerate(self.box):
            if len(part) == 1:
                full = full.narrow(d, part[0][0], part[0][1] - part[0][0])
            else:
                parts = [full.narrow(d, start, stop - start) for start, stop in part]
                full = torch.cat(parts or [full.narrow(d, 0, 0)], d)
        return full

    def tensor(self, device: torch.device | str | None) -> torch.Tensor:
        """All numbers, as an int64 tensor of the block's shape."""
        total = torch.zeros((), dtype=torch.int64, device=device)
        stride = 1
        for d in reversed(range(len(self.shape))):
            parts = [
                torch.arange(start, stop, dtype=torch.int64, device=device)
                for start, stop in self.box[d]
            ]
            empty = torch.zeros(0, dtype=torch.int64, device=device)
            index = parts[0] if len(parts) == 1 else torch.cat(parts or [empty])
            total = total + (index * stride).reshape(-1, *[1] * (len(self.shape) - 1 - d))
            stride *= self.shape[d]
        return total


@remembered(4096)
def _merged(places: Places) -> tuple[int, tuple[_Dim, ...]]:
    """The number of the first element of dims held in one place, and as few dims as there can be.

    A dim that is held whole becomes one with the dim before it.
    """
    base, stride = 0, 1
    dims: list[_Dim] = []  # from the last to the first
    full = 0  # the size of the last of them, where it is held whole
    for size, held in zip(reversed(places.shape), reversed(places.box), strict=True):
        if full:
            held = tuple([(start * full, stop * full) for start, stop in held])
            dims[-1] = held, dims[-1][1]
            full = full * size if held == whole(full * size) else 0
        elif length(held) == 1 and size > 1:
            base += held[0][0] * stride
        elif size > 1:
            dims.append((held, stride))
            full = size if held == whole(size) else 0
        stride *= size
    return base, tuple(reversed(dims))


def _arrays(base: int, dims: tuple[_Dim, ...], most: int) -> Iterator[np.ndarray]:
    counts = [length(held) for held, _ in dims]
    split = len(dims)
    while split and prod(counts[split - 1 :]) <= most:
        split -= 1
    if split == len(dims):  # one row is too long
        for first in _numbers(dims[:-1]):
            for start in range(0, counts[-1], most):
                yield first + base + _slice(dims[-1], start, min(start + most, counts[-1]))
        return
    outer, row = _numbers(dims[:split]) + base, _numbers(dims[split:])
    step = max(1, most // row.size)
    for start in range(0, outer.size, step):
        yield (outer[start : start + step, None] + row).reshape(-1)


def _numbers(dims: tuple[_Dim, ...]) -> np.ndarray:
    """The numbers of the elements that these dims hold."""
    total = np.zeros(1, np.int64)
    for dim in dims:
        total = (total[:, None] + _slice(dim, 0, length(dim[0]))).reshape(-1)
    return total


def _slice(dim: _Dim, start: int, stop: int) -> np.ndarray:
    """The numbers at positions `start` to `stop` of what a dim holds."""
    held, stride = dim
    parts = []
    for low, high in held:
        a, b = max(start, 0), min(stop, high - low)
        if a < b:
            parts.append(np.arange(low + a, low + b, dtype=np.int64))
        start, stop = start - (high - low), stop - (high - low)
    return np.concatenate(parts) * stride if parts else np.zeros(0, np.int64)
