"""`Folder`: the directory of a checkpoint, as its metadata describes it.

The file `.metadata` is what makes a directory a checkpoint: it is put in place last, by one rename.
To the pickle that torch reads, which ends by itself, we add a line: when it was saved, and a
checksum of the whole. The checksums of pieces are in the pickle, where torch does not look.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import attrs

from fdtensor.io.checkpoint.catalog import Catalog, Piece, catalog
from fdtensor.io.checkpoint.records import metadata_in
from fdtensor.layouts.errors import CheckpointError

__all__ = ["METADATA", "Folder", "folder_at", "opened", "saved_at", "sealed"]

METADATA = ".metadata"

_SEAL = re.compile(rb"\nfdtensor saved=(\d{1,20}) blake2b=([0-9a-f]{32})\n")

_DAMAGED = "Load another checkpoint: fd.io.latest_checkpoint(folder) looks for the newest one."

_ON_ALL_RANKS = "Every rank needs all files of a checkpoint: is the directory shared?"


@attrs.frozen
class Folder:
    """The directory of a checkpoint, and what is in it."""

    path: Path
    catalog: Catalog
    saved: int
    """When it was saved, in nanoseconds since 1970."""
    digest: str
    """That of the metadata: ranks that agree on it read the same checkpoint."""

    def check_files(self, pieces: Iterable[Piece]) -> dict[str, int]:
        """The sizes of the files of pieces, which hold them side by side."""
        pieces = list(pieces)
        sizes: dict[str, int] = {}
        total = Counter[str]()
        for piece in pieces:
            if piece.file not in sizes:
                with opened(self.path / piece.file) as file:
                    sizes[piece.file] = os.fstat(file.fileno()).st_size
            total[piece.file] += piece.length
            held = sizes[piece.file]
            if piece.start + piece.length > held or total[piece.file] > held:
                raise CheckpointError(
                    f"{str(self.path / piece.file)!r} has {held} bytes, which is less than the "
                    f"metadata says.",
                    hint=f"The file is cut off, or the metadata is damaged. {_DAMAGED}",
                )
        return sizes


def folder_at(path: str | os.PathLike[str]) -> Folder:
    """The checkpoint in a directory. Raises `CheckpointError` for anything else."""
    place = Path(path)
    what = f"the metadata of {str(path)!r}"
    if not os.path.exists(place / METADATA):
        raise CheckpointError(
            f"there is no checkpoint at {str(path)!r}.",
            hint="A checkpoint is a directory with a file .metadata, which is written last; "
            "load_safetensors reads safetensors files.",
        )
    with opened(place / METADATA) as file:
        data = file.read()
        changed = os.fstat(file.fileno()).st_mtime_ns
    size, saved = _unsealed(data, what)
    metadata, end = metadata_in(data[:size], what)
    listed = catalog(metadata, what, files=True)
    own = any(piece.crc32 is not None for held in listed.pieces.values() for piece in held)
    if end != size or (own and saved is None):
        raise CheckpointError(f"{what} does not end where it should.", hint=_DAMAGED)
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return Folder(place, listed, changed if saved is None else saved, digest)


def saved_at(path: Path) -> int | None:
    """When the checkpoint in a directory was saved; None where there is none, or a damaged one."""
    try:
        if path.is_symlink():
            return None
        with opened(path / METADATA) as file:
            data, changed = file.read(), os.fstat(file.fileno()).st_mtime_ns
        saved = _unsealed(data, str(path))[1]
    except (CheckpointError, OSError):
        return None
    return changed if saved is None else saved


def opened(path: Path, hint: str = _ON_ALL_RANKS) -> BinaryIO:
    """A file to read. Raises `CheckpointError` for what is none: that may wait, or never end."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError("it is no plain file")
        return open(path, "rb")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read: {error}.",
            hint=hint,
        ) from None


def sealed(pickle: bytes, saved: int) -> bytes:
    """The metadata with the line that says when it was saved, and its checksum."""
    data = b"%b\nfdtensor saved=%d" % (pickle, saved)
    return b"%b blake2b=%b\n" % (data, _checksum(data))


def _unsealed(data: bytes, what: str) -> tuple[int, int | None]:
    """The size of the pickle, and when it was saved where it is sealed."""
    start = data.rfind(b"\nfdtensor saved=")
    seal = _SEAL.fullmatch(data, start) if start >= 0 else None
    if seal is None:
        return len(data), None
    if _checksum(data[: seal.start(2) - len(" blake2b=")]) != seal[2]:
        raise CheckpointError(f"{what} is damaged: its checksum differs.", hint=_DAMAGED)
    return start, int(seal[1])


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).hexdigest().encode()
