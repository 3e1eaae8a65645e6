"""`Share`: what a rank writes of a checkpoint, planned by all before anything is written."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from fdtensor.io.checkpoint.boxes import held, rectangles, view
from fdtensor.io.checkpoint.names import Path as Keys
from fdtensor.io.checkpoint.together import relayed
from fdtensor.layouts.errors import CheckpointError
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.text import spans
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


@attrs.frozen
class _Data:
    """What the planner of a rank tells the first one."""

    kinds: Mapping[str, str]
    """The kinds of entries, by name: how a tensor is cut, wherever it is."""
    own: Any
    """What torch's planner tells."""


def _kind(value: Any) -> str:
    return str(value.type) if isinstance(value, Pieces) else "a plain value"


def _refuse_different(kinds: Sequence[Mapping[str, str]]) -> None:
    """Raises `CheckpointError` for the names that are of different kinds on different ranks."""
    ranks: dict[str, dict[str, list[int]]] = {}
    for rank, own in enumerate(kinds):
        for name, kind in own.items():
            ranks.setdefault(name, {}).setdefault(kind, []).append(rank)
    mixed = {name: by_kind for name, by_kind in ranks.items() if len(by_kind) > 1}
    if mixed:
        name, by_kind = next(iter(mixed.items()))
        told = ", ".join(f"{kind} on ranks {spans(some)}" for kind, some in by_kind.items())
        more = f" ({len(mixed) - 1} more are so)" if len(mixed) > 1 else ""
        raise CheckpointError(
            f"{name!r} is {told}{more}: name what each rank has of its own by rank"
        )


class Planner(DefaultSavePlanner):
    """The default planner, but that names are given and DTensors are sets of pieces.

    It writes what several ranks hold on the one of them that has least to write, and refuses a name
    that ranks have for tensors of different kinds, of which the pieces would be put together.
    """

    def __init__(self, paths: Mapping[str, Keys]) -> None:
        super().__init__()
        self.paths = paths

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        kinds = {name: _kind(value) for name, value in self.state_dict.items()}
        return replace(plan, planner_data=_Data(kinds, plan.planner_data))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        known: list[_Data] = [plan.planner_data for plan in all_plans]
        _refuse_different([data.kinds for data in known])
        pairs = zip(all_plans, known, strict=True)
        return super().create_global_plan([replace(p, planner_data=d.own) for p, d in pairs])

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.mappings = state_dict, dict(self.paths)
        self.is_coordinator = is_coordinator

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        try:
            return super().transform_object(write_item, object)
        except Exception as error:
            raise CheckpointError(
                f"{write_item.index.fqn!r} cannot be pickled: {error!r}.",
                hint="Leave it out, or store what it is made of.",
            ) from error

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if isinstance(value, Pieces):
            return value.pieces[tuple(index.offset or ())]
        return super().lookup_object(index)
