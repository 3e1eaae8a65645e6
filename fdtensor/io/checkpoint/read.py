"""`read`: the pieces of files, each checked as a whole and copied to the blocks that want it."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fdtensor.io.checkpoint.catalog import Piece
from fdtensor.io.checkpoint.folder import Folder, opened
from fdtensor.io.checkpoint.fresh import Fresh
from fdtensor.io.pickles import Objects, value_of
from fdtensor.layouts.errors import CheckpointError

__all__ = ["read"]


def read(
    folder: Folder,
    pieces: Mapping[str, Sequence[Piece]],
    fresh: Mapping[str, Fresh],
    objects: Objects,
) -> dict[str, Any]:
    """The objects among these entries, by name; tensors are copied to their memory.

    A piece is read as a whole, even if a part of it is wanted: else its checksum, or for one that
    torch wrote those of its records, would say nothing.
    """
    values: dict[str, Any] = {}
    by_file: dict[str, list[tuple[str, Piece]]] = {}
    for name, own in pieces.items():
        for piece in own:
            by_file.setdefault(piece.file, []).append((name, piece))
    for file, wanted in by_file.items():
        place = folder.path / file
        data = _mapped(place)
        for name, piece in sorted(wanted, key=lambda pair: pair[1].start):
            what = f"{name} in {str(place)!r}"
            part = data[piece.start : piece.start + piece.length]
            if piece.crc32 is not None and zlib.crc32(part) != piece.crc32:
                raise CheckpointError(
                    f"{what} is damaged: its checksum is not that of what was written.",
                    hint="Load another checkpoint: fd.io.latest_checkpoint(folder) looks for one.",
                )
            check, share = piece.crc32 is None, name in fresh
            value = value_of(
                part, what=what, size=len(data), objects=objects, check=check, share=share
            )
            if name in fresh:
                _fill(fresh[name], piece, value, what)
            else:
                values[name] = value
    return values


def _mapped(place: Path) -> memoryview:
    """The bytes of a file, read where they are touched; what is written to them stays here."""
    with opened(place) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise CheckpointError(f"{str(place)!r} cannot be read: {error}.") from None


def _fill(x: Fresh, piece: Piece, value: Any, what: str) -> None:
    """Copies a piece to the blocks that want it."""
    stored = x.asked.stored
    assert stored is not None
    fits = type(value) is torch.Tensor and value.dtype == stored.dtype
    if not fits or tuple(value.shape) != piece.sizes:
        raise CheckpointError(
            f"{what} is not the piece of {stored} that the metadata says.",
            hint="The files are of two checkpoints, or damaged: load another one.",
        )
    x.fill(piece.box, value)
