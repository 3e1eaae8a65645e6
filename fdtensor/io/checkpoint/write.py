"""`Job`: the writing of a checkpoint, in an order in which no kill leaves less than there was.

Each rank writes a file of its own, whose name no other save has. When all files are on the disk,
the first rank renames the new metadata over the old, in one step: until then the old checkpoint is
there, from then on the new one. Only then are old files deleted.
"""

from __future__ import annotations

import os
import pickle
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from fdtensor.io.checkpoint.folder import METADATA, sealed
from fdtensor.io.checkpoint.shares import Share, Whole
from fdtensor.io.checkpoint.siblings import prune
from fdtensor.layouts.errors import CheckpointError
from fdtensor.layouts.torch_private import storage_info_class

__all__ = ["Job", "Span", "new_directory"]

Span = tuple[int, int, int]
"""Where an item is in the file of its rank: start, length and CRC-32."""


@attrs.frozen
class Job:
    """What this rank has to do for a checkpoint in a directory; the first one has the whole."""

    folder: Path
    share: Share
    whole: Whole | None
    keep: int | None
    sync_files: bool

    @property
    def file(self) -> Path:
        """The file of this rank."""
        return self.folder / _file(self.share.place, self.share.tag)

    def write(self) -> list[Span]:
        """Writes the file of this rank, and tells where each item is."""
        if not self.share.items:
            return []
        spans = []
        try:
            with self._written(self.file) as file:
                for item in self.share.items:
                    spans.append(_write(file, self.share.data(item)))
        except BaseException:
            self.clean()
            raise
        return spans

    def finish(self, spans: Sequence[Sequence[Span]]) -> None:
        """Makes the files of all ranks the checkpoint of the directory, and removes old ones."""
        assert self.whole is not None
        draft = self.folder / f"{METADATA}-{self.share.tag}.tmp"
        try:
            self._check_files(spans)
            data = sealed(pickle.dumps(self._metadata(spans), protocol=4), time.time_ns())
            with self._written(draft) as file:
                file.write(data)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        self._sync(self.folder)
        os.replace(draft, self.folder / METADATA)
        self._sync(self.folder)
        for file in self._leftovers():
            file.unlink(missing_ok=True)
        if self.keep is not None:
            prune(self.folder, self.keep)

    def clean(self) -> None:
        """Removes what this rank wrote, after a failure."""
        with suppress(OSError):
            self.file.unlink(missing_ok=True)

    # --- the parts of it ---------------------------------------------------------------------

    @contextmanager
    def _written(self, path: Path) -> Iterator[BinaryIO]:
        """A new file, which is on the disk at the end."""
        with open(path, "xb") as file:
            yield file
            file.flush()
            if self.sync_files:
                os.fsync(file.fileno())

    def _sync(self, folder: Path) -> None:
        if self.sync_files:
            sync_directory(folder)

    def _check_files(self, spans: Sequence[Sequence[Span]]) -> None:
        """Raises where this rank does not see what another one wrote."""
        for place, own in enumerate(spans):
            path = self.folder / _file(place, self.share.tag)
            size = sum(length for _, length, _ in own)
            seen = path.stat().st_size if path.exists() else 0
            if seen != size:
                raise CheckpointError(
                    f"{str(path)!r} has {seen} bytes for the first rank, of {size} that were "
                    "written.",
                    hint="All ranks have to write to one directory that they share.",
                )

    def _metadata(self, spans: Sequence[Sequence[Span]]) -> Any:
        assert self.whole is not None
        record = storage_info_class()
        storage = {}
        for place, (items, own) in enumerate(zip(self.whole.items, spans, strict=True)):
            file = _file(place, self.share.tag)
            for item, (start, length, crc32) in zip(items, own, strict=True):
                info = storage[item.index] = record(file, start, length)
                info.crc32 = crc32
        metadata = self.whole.metadata
        metadata.storage_data = storage
        metadata.storage_meta = StorageMeta(str(self.folder), self.share.tag)
        metadata.version = "1.0.0"
        return metadata

    def _leftovers(self) -> Iterator[Path]:
        """Files of other saves, old ones and such that were killed, and the notes of this one."""
        for pattern in ("*.distcp", f"{METADATA}-*.tmp", "__*.written", "__*.tmp"):
            for file in self.folder.glob(pattern):
                if file.suffix != ".distcp" or not file.stem.endswith(f"_{self.share.tag}"):
                    yield file


def new_directory(path: Path, sync: bool) -> None:
    """Makes a directory, and those above it, on the disk."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing if sync else ():
        sync_directory(made.parent)


def sync_directory(path: Path) -> None:
    """Waits until what a directory lists is on the disk, where the system has such a thing."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file(place: int, tag: str) -> str:
    return f"__{place}_{tag}.distcp"


class _Checked:
    """A file that adds up the checksum of what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.crc32 = 0
        self.length = 0

    def write(self, data: Any) -> int:
        """Writes all of the data."""
        self.crc32 = zlib.crc32(data, self.crc32)
        self.length += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        """Nothing: the file is flushed at its end."""


def _write(file: BinaryIO, data: Any) -> Span:
    """Writes an item as torch does."""
    start, checked = file.tell(), _Checked(file)
    if isinstance(data, torch.Tensor):
        tensor = data.detach().cpu()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        torch.save(tensor, checked)  # type: ignore[arg-type]
    else:
        checked.write(data.getbuffer())
    return start, checked.length, checked.crc32
