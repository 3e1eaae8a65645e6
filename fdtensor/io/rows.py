"""`Rows`: which samples of a batch a rank reads, and the DTensors that they are parts of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.blocks import Intervals, united, whole
from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.prefixes import layout_of_each
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, paths, unflatten
from fdtensor.ops.notation.local_index import subset
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
        wanted, names = layout_of_each(layouts, spec), paths(spec, "batch")
        for t, name in zip(tensors, names, strict=True):
            if t is not None:
                _refuse_other_rows(t, 1, name)
        shapes = [None if t is None else tuple(t.shape[1:]) for t in tensors]
        dtypes = [None if t is None else t.dtype for t in tensors]
        return cls(comm, spec, shapes, dtypes, wanted, names)

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
        return united(rows, count)

    def indices(self, batches: Sequence[Sequence[int]]) -> list[list[int]]:
        """The samples that this rank reads of each batch: one at least, to learn what they are."""
        own = {count: self.own(count) for count in {len(batch) for batch in batches}}
        each = [[b[i] for start, stop in own[len(b)] for i in range(start, stop)] for b in batches]
        return [read or [batch[0]] for read, batch in zip(each, batches, strict=True)]

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
        read = sum(stop - start for start, stop in held) or 1
        for k, type in enumerate(self.types(count)):
            if type is not None:
                _refuse_other_rows(leaves[k], read, self.names[k])
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
        for d, own in enumerate(box):
            x = subset(x, d, held if d == 0 else whole(x.shape[d]), own)
        return from_local(x.contiguous(), type, comm, check="never")


def _refuse_other_rows(x: torch.Tensor, read: int, name: str) -> None:
    """Raises `LayoutError` for a tensor that has not one row for each sample that was read."""
    if not x.ndim or len(x) != read:
        shape = f"of shape {tuple(x.shape)}"
        raise LayoutError(
            f"{name} {shape} has not one row for each of {read} sample{'s' * (read != 1)}.",
            hint="A rank collates its own samples alone, so the collate_fn gives a row for each. "
            "Of what is no DataLoader, as a list of batches, all ranks read whole batches.",
        )
