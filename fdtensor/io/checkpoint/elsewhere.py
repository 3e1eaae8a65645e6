"""`read_elsewhere`: what a `StorageReader` of `torch.distributed.checkpoint` reads."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from fdtensor.io.checkpoint.catalog import Catalog
from fdtensor.io.checkpoint.fresh import Fresh
from fdtensor.io.checkpoint.together import storing
from fdtensor.io.pickles import Objects, value_of
from fdtensor.layouts.blocks import Box, length
from fdtensor.runtime.comm import Comm, inside

__all__ = ["read_elsewhere"]


def read_elsewhere(
    reader: StorageReader,
    listed: Catalog,
    names: list[str],
    fresh: Mapping[str, Fresh],
    comm: Comm[Any],
    objects: Objects,
) -> dict[str, Any]:
    """The objects of these names; tensors are copied to their memory. Collective."""
    planner = _Planner(fresh, dict.fromkeys(names), listed, objects)
    if inside(comm):
        with storing(comm, "the checkpoint cannot be read") as ranks:
            load({}, storage_reader=reader, planner=planner, **ranks)
    return planner.values


class _Planner(LoadPlanner):
    """Reads what is needed of each piece in one go, and fills all blocks that want it."""

    def __init__(
        self,
        fresh: Mapping[str, Fresh],
        values: dict[str, Any],
        listed: Catalog,
        objects: Objects,
    ) -> None:
        self.fresh = fresh
        self.values = values
        self.listed = listed
        self.objects = objects
        self.parts: dict[MetadataIndex, Box] = {}
        """The rectangle that is read of each piece."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        items = [_object_item(name) for name in self.values]
        for name, x in self.fresh.items():
            for i, piece in enumerate(self.listed.pieces[name]):
                needed = x.needed(piece.box)
                if needed is not None:
                    index = MetadataIndex(name, piece.offsets, i)
                    self.parts[index] = needed
                    items.append(_tensor_item(index, needed))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name, data = read_item.dest_index.fqn, memoryview(value.getbuffer())
        self.values[name] = value_of(data, what=name, size=len(data), objects=self.objects)

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
