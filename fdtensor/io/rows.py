"""`Rows`: which samples of a batch a rank reads, and the DTensors that they are parts of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.blocks import Intervals, length
from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.prefixes import layout_of_each
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, paths, unflatten
from fdtensor.runtime.comm import Comm
from fdtensor.tensors.distribution import distribute, from_local
from fdtensor.tensors.dtensor import DTensor

__all__ = ["Rows"]


@attrs.frozen(eq=False)
class Rows:
    """The tensors of a batch, without its samples, and how they are laid out."""

    comm: Comm[Any]
    spec: Any
    shapes: Sequence[tuple[int, ...] | None]
    """The shape of a sample in each leaf; None for what is no tensor."""
    dtypes: Sequence[torch.dtype | None]
    layouts: Sequence[Layout]
    names: Sequence[str]

    @classmethod
    def of(cls, loader: Any, layouts: Any, comm: Comm[Any]) -> Rows:
        """Those of the batches of a loader, from its first sample."""
        batch = loader.collate_fn([loader.dataset[0]])
        leaves, spec = flatten(batch)
        tensors = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        wanted = layout_of_each(layouts, spec, lambda node: isinstance(node, Layout))
        shapes = [None if t is None else tuple(t.shape[1:]) for t in tensors]
        dtypes = [None if t is None else t.dtype for t in tensors]
        return cls(comm, spec, shapes, dtypes, wanted, paths(spec, "batch"))

    def types(self, count: int) -> list[TensorType | None]:
        """The types of a batch of `count` samples."""
        return [
            None if s is None or d is None else TensorType((count, *s), d, layout)
            for s, d, layout in zip(self.shapes, self.dtypes, self.layouts, strict=True)
        ]

    def own(self, count: int) -> Intervals:
        """The rows of a batch of `count` samples of which this rank holds some part."""
        rank = self.comm.rank
        if rank is None:
            return ((0, count),) if count else ()
        rows: list[tuple[int, int]] = []
        for type in self.types(count):
            coord = None if type is None else type.mesh.coord(rank)
            if type is not None and coord is not None:
                rows += type.box(coord)[0]
        return _united(rows)

    def indices(self, batch: Sequence[int]) -> list[int]:
        """The samples that this rank reads of a batch: one at least, to learn what they are."""
        own = [batch[i] for a, b in self.own(len(batch)) for i in range(a, b)]
        return own or [batch[0]]

    def distributed(self, local: Any, count: int) -> Any:
        """The batch of `count` samples, from what this rank has read of it."""
        leaves, spec = flatten(local)
        if spec != self.spec:
            raise LayoutError(
                "a batch has another structure than the first sample.",
                first=self.spec,
                batch=spec,
                hint="Let the dataset and the collate_fn give the same pytree each time.",
            )
        held = self.own(count)
        for k, type in enumerate(self.types(count)):
            if type is not None:
                leaves[k] = self._placed(leaves[k], type, held, self.names[k])
        return unflatten(spec, leaves)

    def _placed(
        self, x: torch.Tensor, type: TensorType, held: Intervals, name: str
    ) -> DTensor[Any]:
        if (tuple(x.shape[1:]), x.dtype) != (type.shape[1:], type.dtype):
            raise LayoutError(
                f"{name} has samples of shape {tuple(x.shape[1:])} and {x.dtype}, not of "
                f"{type.shape[1:]} and {type.dtype} as the first one.",
                hint="Let the collate_fn give samples of one shape, or iterate over whole batches: "
                "shard_batches takes any iterable.",
            )
        comm, rank = self.comm, self.comm.rank
        if comm.device is not None:
            x = x.to(comm.device, non_blocking=True)
        if rank is None:
            return distribute(x, type.layout, comm, check="never")
        coord = type.mesh.coord(rank)
        if coord is None:
            return from_local(x[:0], type, comm, check="never")
        box = type.box(coord)
        x = _taken(x, 0, _places(box[0], held))
        for d in range(1, x.dim()):
            x = _taken(x, d, box[d])
        return from_local(x.contiguous(), type, comm, check="never")


def _united(ranges: Sequence[tuple[int, int]]) -> Intervals:
    """The ranges joined where they touch or overlap."""
    joined: list[tuple[int, int]] = []
    for a, b in sorted(ranges):
        if joined and a <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(b, joined[-1][1]))
        else:
            joined.append((a, b))
    return tuple(joined)


def _places(rows: Intervals, held: Intervals) -> Intervals:
    """Where rows stand among those that are held."""
    places: list[tuple[int, int]] = []
    passed = 0
    for a, b in held:
        for start, stop in rows:
            low, high = max(a, start), min(b, stop)
            if low < high:
                places.append((low - a + passed, high - a + passed))
        passed += b - a
    return tuple(places)


def _taken(x: torch.Tensor, dim: int, ranges: Intervals) -> torch.Tensor:
    """The entries of a dim in these ranges."""
    if length(ranges) == x.shape[dim]:
        return x
    parts = [x.narrow(dim, a, b - a) for a, b in ranges]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)
