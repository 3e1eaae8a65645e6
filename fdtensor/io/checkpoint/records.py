"""Records: what the metadata of a checkpoint is made of, read from its pickle by a table of them.

They have the attributes of torch's records of the same names, in less memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

import attrs
import torch

from fdtensor.io.pickles import Known, Names, unpickled
from fdtensor.io.pickles.values import DTYPES, size_of
from fdtensor.layouts.errors import CheckpointError
from fdtensor.layouts.torch_private import memory_format_class

__all__ = ["Metadata", "metadata_in"]


@attrs.define(eq=False)
class Metadata:
    """The names, shapes and pieces of what is stored, and where they lie."""

    state_dict_metadata: Any = None
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: Any = None
    version: Any = None


@attrs.define(eq=False)
class TensorStorageMetadata:
    """A tensor and its pieces."""

    properties: Any = None
    size: Any = None
    chunks: Any = None


@attrs.define(eq=False)
class TensorProperties:
    """What a tensor is, but for its shape."""

    dtype: Any = None


@attrs.define(eq=False)
class BytesStorageMetadata:
    """An object."""


@attrs.define(eq=False)
class ChunkStorageMetadata:
    """A piece of a tensor."""

    offsets: Any = None
    sizes: Any = None


@attrs.define(eq=False)
class MetadataIndex:
    """The key of a piece: the name of the tensor, and the first index in every dim."""

    fqn: Any = None
    offset: Any = None
    index: Any = None

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, MetadataIndex)
        return same and (self.fqn, self.offset) == (other.fqn, other.offset)

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))


@attrs.define(eq=False)
class StorageInfo:
    """Where a piece lies, and its checksum."""

    relative_path: Any = None
    offset: Any = None
    length: Any = None
    transform_descriptors: Any = None
    crc32: Any = None


@attrs.define(eq=False)
class StorageMeta:
    """Where and by which save a checkpoint was written."""

    checkpoint_id: Any = None
    save_id: Any = None
    load_id: Any = None
    modules: Any = None


Check = Callable[[Any], bool]


def metadata_in(data: bytes, what: str) -> tuple[Metadata, int]:
    """The metadata that a pickle has, and where the pickle ends.

    Its records have attributes of the right kinds; what they say is not checked yet. Raises
    `CheckpointError` for anything but the records that torch writes.
    """
    hint = "The metadata of a checkpoint has records of torch alone: it is damaged, or an attack."
    metadata, end = unpickled(data, _names(), what=what, size=len(data), hint=hint)
    if type(metadata) is not Metadata:
        raise CheckpointError(f"{what} is no metadata, but {type(metadata).__name__}.", hint=hint)
    return metadata, end


# --- the kinds of attributes -----------------------------------------------------------------


def _of(*kinds: type) -> Check:
    return lambda value: type(value) in kinds


def _texts(value: Any) -> bool:
    return type(value) is list and all(type(text) is str for text in value)


def _int(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


_SIZE, _TEXT = _of(torch.Size), _of(str)


def _anything(_: Any) -> bool:
    return True


# --- the table -------------------------------------------------------------------------------


def _record(kind: type, fields: Mapping[str, Check]) -> Known:
    """A record, whose attributes are put in if each is of its kind."""

    def build(target: Any, state: Any) -> None:
        if type(state) is not dict:
            raise ValueError(f"the state of a {kind.__name__} is no dict")
        for name, value in state.items():
            check = fields.get(name) if type(name) is str else None
            if check is None or not check(value):
                raise ValueError(f"a {kind.__name__} has no such {str(name)[:80]!r}")
            setattr(target, name, value)
        state.clear()  # the pickle remembers it to its end

    return Known(kind, None, kind, build)


def _properties() -> Known:
    """What a tensor is, which has a state of its own."""
    kinds = (torch.dtype, torch.layout, bool, memory_format_class(), bool)

    def build(target: TensorProperties, state: Any) -> None:
        fits = type(state) is tuple and len(state) == 5
        if not fits or not all(map(isinstance, state, kinds)):
            raise ValueError("the properties of a tensor are no such thing")
        target.dtype = state[0]

    return Known(TensorProperties, None, TensorProperties, build)


def _layout(name: Any) -> torch.layout:
    layout = _LAYOUTS.get(name) if type(name) is str else None
    if layout is None:
        raise ValueError("a tensor has no such layout")
    return layout


_LAYOUTS = {str(v): v for v in vars(torch).values() if isinstance(v, torch.layout)}


def _path(*parts: Any) -> PurePosixPath:
    if not all(type(part) is str for part in parts):
        raise ValueError("a path is no text")
    return PurePosixPath(*parts)


@functools.cache
def _names() -> Names:
    metadata = "torch.distributed.checkpoint.metadata"
    old = "torch.distributed._shard.sharded_tensor.metadata"
    formats = memory_format_class()
    paths = Known(PurePosixPath, _path)
    return Names(
        {
            **DTYPES,
            f"{metadata}.Metadata": _record(Metadata, _METADATA),
            f"{metadata}.TensorStorageMetadata": _record(TensorStorageMetadata, _TENSOR),
            f"{metadata}.BytesStorageMetadata": _record(BytesStorageMetadata, {}),
            f"{metadata}.ChunkStorageMetadata": _record(ChunkStorageMetadata, _CHUNK),
            f"{metadata}.MetadataIndex": _record(MetadataIndex, _INDEX),
            f"{metadata}.StorageMeta": _record(StorageMeta, _STORAGE),
            "torch.distributed.checkpoint.filesystem._StorageInfo": _record(StorageInfo, _INFO),
            **{
                name: _properties()
                for name in (f"{metadata}.TensorProperties", f"{old}.TensorProperties")
            },
            **{
                name: Known(formats, formats)
                for name in (f"{metadata}._MEM_FORMAT_ENCODING", f"{old}.MEM_FORMAT_ENCODING")
            },
            "torch.Size": Known(torch.Size, size_of, size_of),
            "torch.serialization._get_layout": Known(_layout, _layout),
            **{f"pathlib.{name}": paths for name in ("PosixPath", "PurePosixPath", "WindowsPath")},
        }
    )


_METADATA = {
    "state_dict_metadata": _of(dict),
    "planner_data": _anything,
    "storage_data": _of(dict),
    "storage_meta": _or_none(_of(StorageMeta)),
    "version": _or_none(_TEXT),
}
_TENSOR = {"properties": _of(TensorProperties), "size": _SIZE, "chunks": _of(list)}
_CHUNK = {"offsets": _SIZE, "sizes": _SIZE}
_INDEX = {"fqn": _TEXT, "offset": _or_none(_SIZE), "index": _or_none(_int)}
_STORAGE = {
    "checkpoint_id": _of(str, PurePosixPath, type(None)),
    "save_id": _or_none(_TEXT),
    "load_id": _or_none(_TEXT),
    "modules": _texts,
}
_INFO = {
    "relative_path": _TEXT,
    "offset": _int,
    "length": _int,
    "transform_descriptors": _or_none(_texts),
    "crc32": _int,
}
