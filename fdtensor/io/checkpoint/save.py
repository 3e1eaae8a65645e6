"""`save_checkpoint`: a pytree of DTensors as a checkpoint of `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter

from fdtensor.io.checkpoint.boxes import held, rectangles, view
from fdtensor.io.checkpoint.names import Leaf, named
from fdtensor.io.checkpoint.names import Path as Keys
from fdtensor.io.checkpoint.same import differences
from fdtensor.io.checkpoint.together import storing, together
from fdtensor.layouts.errors import CheckpointError, ValueTreeError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.runtime.comm import Comm, inside
from fdtensor.tensors.connect import redistribute
from fdtensor.tensors.dtensor import DTensor

__all__ = ["OnDifference", "save_checkpoint"]

OnDifference = Literal["error", "warn", "ignore"]
"""The response where ranks differ in values that are said to be replicated."""

SHOWN = 12
"""How many entries an error names."""


@opaque
def save_checkpoint(
    tree: Any,
    path: Any,
    comm: Comm[Any],
    *,
    overwrite: bool = False,
    on_difference: OnDifference = "error",
) -> None:
    """Writes a pytree of DTensors, plain tensors and other objects as a checkpoint at `path`.

    Collective over the ranks of `comm`; on a simulated one this process writes everything. The
    names are those that `torch.distributed.checkpoint` gives a state dict of the same dicts and
    lists, so that `dcp.load` reads it. Pending terms are reduced first. Each block is written once,
    by one of the ranks that hold it, without a copy of the whole. Plain tensors and objects are
    written by one rank too. Ranks may have entries that others do not have.

    Replicas, and what is no DTensor, are compared by fingerprints of their bits before anything is
    written, which takes one look at their memory. Where ranks that have an entry differ in it, as
    they do in the state of an optimizer of torch on local tensors, `on_difference` says whether
    that is an "error" on all ranks, is to "warn", or is to "ignore", which compares nothing.

    `path` is a directory, or a `StorageWriter` for other places. Raises `CheckpointError` where
    there is a checkpoint already, unless `overwrite`, or ranks differ, and `ValueTreeError` for a
    pytree that has a name twice or leaves that cannot be stored.

    >>> import tempfile
    >>> mesh = Mesh(x=2)
    >>> comm = SimulatedComm(mesh)
    >>> x = distribute(torch.arange(4), mesh.layout("x"), comm)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fd.io.save_checkpoint({"x": x}, folder + "/step", comm)
    ...     print(fd.io.checkpoint_contents(folder + "/step"))
    x  i64[4]
    1 entry, 32 B of tensors
    """
    about = "save_checkpoint"
    leaves = together(about, comm, lambda: _checked(tree, path, comm, overwrite))
    settled = {leaf.name: leaf.value for leaf in leaves}
    pending = {n: x for n, x in settled.items() if isinstance(x, DTensor) and x.layout.partial}
    settled |= redistribute(pending, {name: _reduced(x.type) for name, x in pending.items()})
    if not inside(comm):
        return
    if on_difference != "ignore":
        _compared(settled, comm, on_difference)
    own = not isinstance(path, StorageWriter)
    if own and overwrite:
        together(about, comm, lambda: _cleared(Path(path), comm))
    state = {n: _Pieces.of(x) if isinstance(x, DTensor) else x for n, x in settled.items()}
    writer = FileSystemWriter(path) if own else path
    planner = _Planner({leaf.name: leaf.path for leaf in leaves})
    with storing(comm, f"the checkpoint at {_place(path)} was not written") as ranks:
        save(state, storage_writer=writer, planner=planner, **ranks)


# --- what is wrong ---------------------------------------------------------------------------


def _checked(tree: Any, path: Any, comm: Comm[Any], overwrite: bool) -> list[Leaf]:
    """The named leaves of a pytree that can be stored."""
    if (
        isinstance(path, (str, os.PathLike))
        and not overwrite
        and (Path(path) / ".metadata").exists()
    ):
        raise CheckpointError(
            f"there is a checkpoint at {str(path)!r} already.",
            hint="Save to another directory, or pass overwrite=True.",
        )
    leaves, _ = named(tree)
    problems: dict[str, str] = {}
    seen: dict[str, Leaf] = {}
    for leaf in leaves:
        other = seen.setdefault(leaf.name, leaf)
        twice = f"is the name of {other.path} and of {leaf.path}" if other is not leaf else None
        problem = twice or _problem(leaf, comm)
        if problem is not None:
            problems[leaf.name or "tree"] = problem
    if problems:
        raise ValueTreeError(
            f"{len(problems)} of {len(leaves)} leaves cannot be stored.",
            **problems,
            hint="A leaf is a DTensor, a tensor or an object that can be pickled.",
        )
    return leaves


def _compared(values: Mapping[str, Any], comm: Comm[Any], on_difference: OnDifference) -> None:
    """Raises or warns where ranks differ in what they claim to hold alike."""
    unlike = differences(values, comm)
    if not unlike:
        return
    shown = dict(list(unlike.items())[:SHOWN])
    if len(unlike) > len(shown):
        shown["..."] = f"{len(unlike) - len(shown)} more"
    error = CheckpointError(
        f"{len(unlike)} of {len(values)} entries are not the same on all ranks that have them, and "
        "one rank's would be kept.",
        **shown,
        hint="Distribute what each rank has a part of (the state of fdtensor.optim is), name what "
        'each has of its own by rank, or keep one with on_difference="ignore".',
    )
    if on_difference == "error":
        raise error
    warnings.warn(str(error), stacklevel=3)


def _problem(leaf: Leaf, comm: Comm[Any]) -> str | None:
    value = leaf.value
    if not leaf.path:
        return "has no name: pass a dict"
    if isinstance(value, (Layout, TensorType)):
        return f"is a {type(value).__name__}, not a value"
    if not isinstance(value, DTensor):
        stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        return f"is a {type(value).__name__}: pass its state_dict()" if stateful else None
    if (value.comm.rank is None) != (comm.rank is None):
        return f"is on {value.comm!r}, not on ranks of {comm!r}"
    return value.comm.mistake(value.local, value.type)


def _place(path: Any) -> str:
    return repr(str(path)) if isinstance(path, (str, os.PathLike)) else type(path).__name__


def _cleared(path: Path, comm: Comm[Any]) -> None:
    """Takes away what makes an old checkpoint one, and its files, before new ones are written."""
    if comm.rank in (None, min(comm.mesh.order)):
        for file in [path / ".metadata", *path.glob("*.distcp")]:
            file.unlink(missing_ok=True)


def _reduced(type: TensorType) -> Layout:
    """The layout in which terms are reduced: every partial axis cuts the longest dim."""
    layout = type.layout
    longest = max(range(len(type.shape)), key=lambda d: type.shape[d], default=None)
    for axis in layout.partial:
        layout = layout.placed(axis, Replicate())
        layout = layout if longest is None else layout.split(axis, longest)
    return layout


# --- what is written -------------------------------------------------------------------------


@attrs.frozen
class _Pieces:
    """The rectangles of a tensor on this process: a checkpointable value, in the words of DCP."""

    type: TensorType
    pieces: Mapping[tuple[int, ...], torch.Tensor]
    """Views of local tensors, each by its first index in every dim."""

    @classmethod
    def of(cls, x: DTensor[Any]) -> _Pieces:
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


class _Planner(DefaultSavePlanner):
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
        if isinstance(value, _Pieces):
            return value.pieces[tuple(index.offset or ())]
        return super().lookup_object(index)
