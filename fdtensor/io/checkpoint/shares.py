"""`Share`: what a rank writes of a checkpoint, planned by all before anything is written."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fdtensor.io.checkpoint.boxes import held, rectangles, view
from fdtensor.io.checkpoint.names import Path as Keys
from fdtensor.io.checkpoint.together import relayed
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.runtime.comm import Comm
from fdtensor.tensors.dtensor import DTensor

__all__ = ["Pieces", "Planner", "Share", "Whole", "shared_out"]

Data = io.BytesIO | torch.Tensor
"""What is written: an object as `torch.save` has it, or a piece of a tensor."""


@attrs.frozen
class Share:
    """What one rank writes: items, and the data of each."""

    place: int
    """That of the rank among those of its Comm."""
    tag: str
    """A few letters that tell this save from others: they are in the names of its files."""
    items: Sequence[WriteItem]
    data: Callable[[WriteItem], Data]

    def copied(self) -> Share:
        """The share with data of its own, which does not change when the values do."""
        copies = {item.index: _copy(self.data(item)) for item in self.items}
        return attrs.evolve(self, data=lambda item: copies[item.index])


@attrs.frozen
class Whole:
    """What the first rank knows: the metadata, and the items of all ranks."""

    tag: str
    metadata: Metadata
    items: Sequence[Sequence[WriteItem]]


def shared_out(
    state: Mapping[str, Any],
    paths: Mapping[str, Keys],
    comm: Comm[Any],
    what: str,
    begin: Callable[[], None],
) -> tuple[Share, Whole | None]:
    """The share of this rank, and the whole on the first one. Collective.

    What several ranks hold, the one of them writes that has least to write. The first rank calls
    `begin` once all is planned.
    """
    planner = Planner(paths)
    whole: list[Whole] = []

    def local() -> Any:
        planner.set_up_planner(dict(state))
        return planner.create_local_plan()

    def spread(plans: list[Any]) -> list[Any]:
        plans, metadata = planner.create_global_plan(plans)
        tag = uuid.uuid4().hex[:8]
        whole.append(Whole(tag, metadata, [plan.items for plan in plans]))
        begin()
        return [(i, tag, plan.items) for i, plan in enumerate(plans)]

    place, tag, items = relayed(comm, what, local, spread)
    return Share(place, tag, items, planner.resolve_data), whole[0] if whole else None


def _copy(data: Data) -> Data:
    if isinstance(data, io.BytesIO):
        return data
    return data.detach().to("cpu", copy=True)


# --- how torch plans -------------------------------------------------------------------------


@attrs.frozen
class Pieces:
    """The rectangles of a tensor on this process: a checkpointable value, in the words of DCP."""

    type: TensorType
    pieces: Mapping[tuple[int, ...], torch.Tensor]
    """Views of local tensors, each by its first index in every dim."""

    @classmethod
    def of(cls, x: DTensor[Any]) -> Pieces:
        """The pieces of all blocks here, each once; a tensor without elements is one piece."""
        pieces: dict[tuple[int, ...], torch.Tensor] = {}
        for box, local in held(x):
            for piece in rectangles(box):
                pieces.setdefault(
                    tuple(start for start, _ in piece), view(local.detach(), box, piece)
                )
            if not x.type.numel:
                pieces[(0,) * len(x.shape)] = local.new_empty(x.shape)
        return cls(x.type, pieces)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        size = torch.Size(self.type.shape)
        items = []
        for offset, piece in self.pieces.items():
            chunk = ChunkStorageMetadata(torch.Size(offset), piece.shape)
            properties = TensorProperties.create_from_tensor(piece)
            data = TensorWriteData(chunk, properties, size)
            index = MetadataIndex(name, torch.Size(offset))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items


class Planner(DefaultSavePlanner):
    """The default planner, but that names are given and DTensors are sets of pieces.

    It writes what several ranks hold on the one of them that has least to write.
    """

    def __init__(self, paths: Mapping[str, Keys]) -> None:
        super().__init__()
        self.paths = paths

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.mappings = state_dict, dict(self.paths)
        self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if isinstance(value, Pieces):
            return value.pieces[tuple(index.offset or ())]
        return super().lookup_object(index)
