"""`load_checkpoint`: DTensors of any layouts from what `torch.distributed.checkpoint` stored."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from fdtensor.io.checkpoint.boxes import rectangle
from fdtensor.io.checkpoint.contents import metadata_of, of_metadata
from fdtensor.io.checkpoint.fresh import Fresh
from fdtensor.io.checkpoint.request import Request, request
from fdtensor.io.checkpoint.together import storing, together
from fdtensor.layouts.blocks import Box, length
from fdtensor.layouts.opaque import opaque
from fdtensor.runtime.comm import Comm, inside

__all__ = ["load_checkpoint"]


@opaque
def load_checkpoint(path: Any, like: Any, comm: Comm[Any], *, strict: bool = True) -> Any:
    """The pytree `like`, filled from the checkpoint at `path`, whatever mesh wrote it.

    Collective over the ranks of `comm`. The leaves of `like` say what is wanted: a `TensorType`, a
    `Layout` for a tensor of any shape and dtype, a DTensor or a tensor for one like it, anything
    else for an object. A `Layout`, or a function that gives one for the name and `Stored` of a
    tensor, may stand for all entries below its place: a single one gives the whole checkpoint,
    nested as it was saved. Each rank reads the pieces that have parts of its blocks, each once.

    All tensors are new. `path` is a directory, or a `StorageReader` for other places. Raises one
    `CheckpointError` on all ranks, before anything is read, for whatever is missing, of another
    shape or dtype, or, where `strict`, left over. As in torch, objects are unpickled: load only
    what you trust.

    >>> import tempfile
    >>> two, three = SimulatedComm(Mesh(x=2)), SimulatedComm(Mesh(x=3))
    >>> w = distribute(torch.arange(6), two.mesh.layout("x"), two)
    >>> with tempfile.TemporaryDirectory() as path:
    ...     fd.save_checkpoint({"w": w, "step": 10}, path, two)
    ...     state = fd.load_checkpoint(path, {"w": three.mesh.layout("x"), "step": 0}, three)
    >>> state["w"].local, state["step"]
    ((tensor([0, 1]), tensor([2, 3]), tensor([4, 5])), 10)
    """
    reader, wanted, planner = together(
        "load_checkpoint", comm, lambda: _prepared(path, like, comm, strict)
    )
    if inside(comm):
        with storing(comm, "the checkpoint cannot be read") as ranks:
            load({}, storage_reader=reader, planner=planner, **ranks)
    return wanted.filled({**planner.objects, **{n: x.value() for n, x in planner.fresh.items()}})


def _prepared(path: Any, like: Any, comm: Comm[Any], strict: bool) -> tuple[Any, Request, _Planner]:
    """The reader of a checkpoint, what is asked of it and what will be read."""
    reader, metadata = metadata_of(path)
    wanted = request(like, of_metadata(metadata), comm, strict, "the checkpoint")
    fresh = {n: Fresh.of(asked) for n, asked in wanted.asked.items() if asked.stored}
    sources = {
        name: [rectangle(c.offsets, c.sizes) for c in metadata.state_dict_metadata[name].chunks]
        for name in fresh
    }
    for name, x in fresh.items():
        x.check_covered(name, sources[name])
    objects = dict.fromkeys(name for name, asked in wanted.asked.items() if asked.stored is None)
    return reader, wanted, _Planner(fresh, objects, metadata)


class _Planner(LoadPlanner):
    """Reads what is needed of each piece in one go, and fills all blocks that want it."""

    def __init__(
        self, fresh: Mapping[str, Fresh], objects: dict[str, Any], metadata: Metadata
    ) -> None:
        self.fresh = fresh
        self.objects = objects
        self.metadata = metadata
        self.parts: dict[MetadataIndex, Box] = {}
        """The rectangle that is read of each piece."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        items = [_object_item(name) for name in self.objects]
        for name, x in self.fresh.items():
            for i, chunk in enumerate(self.metadata.state_dict_metadata[name].chunks):  # type: ignore[union-attr]
                needed = x.needed(rectangle(chunk.offsets, chunk.sizes))
                if needed is not None:
                    index = MetadataIndex(name, chunk.offsets, i)
                    self.parts[index] = needed
                    items.append(_tensor_item(index, needed))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = torch.load(value, weights_only=False)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        x, needed = self.fresh[read_item.dest_index.fqn], self.parts[read_item.dest_index]
        target = x.target(needed)
        if target is None:
            target = torch.empty(read_item.lengths, dtype=x.tensor.dtype)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        x, needed = self.fresh[read_item.dest_index.fqn], self.parts[read_item.dest_index]
        if x.target(needed) is None:
            x.fill(needed, tensor)


def _object_item(name: str) -> ReadItem:
    index, none = MetadataIndex(name), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)


def _tensor_item(index: MetadataIndex, needed: Box) -> ReadItem:
    """Reads a rectangle of the piece that has this index."""
    offset = index.offset or ()
    start = torch.Size(
        intervals[0][0] - first for intervals, first in zip(needed, offset, strict=True)
    )
    lengths = torch.Size(map(length, needed))
    zeros = torch.Size((0,) * len(lengths))
    return ReadItem(LoadItemType.TENSOR, index, zeros, index, start, lengths)
