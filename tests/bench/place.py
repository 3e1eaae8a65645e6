"""`Place`: what a way by hand knows of its rank; and the few calls that all ways share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from tests.bench.cases import Shape

__all__ = ["Place", "Way", "finish", "gather", "length", "scatter_sum", "start"]

# torch 2.13 renames these two; the functions are the same
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@attrs.frozen
class Place:
    """A rank of 4, the full shape and, on 2 by 2, the group of the ranks that share its column."""

    rank: int
    shape: Shape
    column: Any = None

    @property
    def peers(self) -> list[int]:
        """The other ranks, starting after this one, so that not all send to the first at once."""
        return [(self.rank + i) % 4 for i in (1, 2, 3)]

    def cuts(self, dim: int, count: int = 4) -> list[slice]:
        """The blocks of a dim in `count`, as `torch.chunk` cuts."""
        size = self.shape[dim]
        step = -(-size // count)
        return [slice(min(size, step * i), min(size, step * (i + 1))) for i in range(count)]


Way = Callable[[torch.Tensor, Place], torch.Tensor]
"""Takes what this rank holds, a contiguous tensor, and returns what it shall hold, a new one."""

Tensors = Iterable[tuple[int, torch.Tensor]]
"""Contiguous tensors with the rank that each comes from or goes to."""


def start(recvs: Tensors, sends: Tensors) -> list[Any]:
    """The works of messages, those that are received first."""
    works = [dist.irecv(tensor, peer) for peer, tensor in recvs]
    return works + [dist.isend(tensor, peer) for peer, tensor in sends]


def finish(works: Sequence[Any]) -> None:
    """Waits for all works."""
    for work in works:
        work.wait()


def length(cut: slice) -> int:
    """How many indices a cut has."""
    return cut.stop - cut.start
