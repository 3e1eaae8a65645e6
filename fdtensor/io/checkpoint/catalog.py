"""`Catalog`: the entries of a checkpoint, and which piece of which file has what part of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import PurePosixPath
from typing import Any

import attrs
import torch

from fdtensor.io.checkpoint.boxes import rectangle
from fdtensor.io.checkpoint.names import Path
from fdtensor.io.checkpoint.stored import Contents, Stored
from fdtensor.layouts.blocks import Box
from fdtensor.layouts.errors import CheckpointError

__all__ = ["Catalog", "Piece", "catalog", "check_inside"]

HINT = "The metadata is damaged, or was not written by torch or fdtensor: load another checkpoint."

_DEPTH = 100
"""How many keys a name may be joined of."""


@attrs.frozen
class Piece:
    """A part of a tensor, or an object, and the bytes of a file that it is in."""

    offsets: tuple[int, ...] = ()
    """The first index of each dim."""
    sizes: tuple[int, ...] = ()
    file: str = ""
    """In the directory of the checkpoint; empty where a `StorageReader` knows where it is."""
    start: int = 0
    length: int = 0
    crc32: int | None = None
    """The CRC-32 of these bytes; torch writes none."""

    @property
    def box(self) -> Box:
        """The indices that it has."""
        return rectangle(self.offsets, self.sizes)


@attrs.frozen
class Catalog:
    """What a checkpoint holds, and the pieces of each entry; an object is one piece."""

    contents: Contents
    pieces: Mapping[str, Sequence[Piece]]


def catalog(metadata: Any, what: str, *, files: bool) -> Catalog:
    """The catalog that the `Metadata` of a checkpoint gives, whoever wrote it.

    Where `files`, it says where in files the pieces are. Raises `CheckpointError` unless the pieces
    of each tensor have all its elements, each once, and files are in the directory.
    """
    try:
        located = dict(_located(metadata.storage_data)) if files else {}
        entries: dict[str, Stored | None] = {}
        pieces: dict[str, list[Piece]] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if type(name) is not str:
                raise ValueError("a name is no text")
            entries[name], pieces[name] = _entry(name, entry, located, files)
        return Catalog(Contents(entries, _paths(metadata.planner_data)), pieces)
    except CheckpointError:
        raise
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        told = str(error) if type(error) is ValueError else repr(error)
        raise CheckpointError(f"{what} makes no sense: {told[:300]}.", hint=HINT) from None


def check_inside(file: Any) -> str:
    """The name of a file below a directory. Raises ValueError for one that leaves it."""
    if type(file) is not str or not file or "\0" in file or "\\" in file:
        raise ValueError(f"{file!r:.80} is no name of a file")
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"the file {file[:80]!r} is not in its directory")
    return file


# --- what is checked -------------------------------------------------------------------------


def _located(storage: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    """Where each piece is, by its name and first indices."""
    for index, info in storage.items():
        yield (index.fqn, index.offset), info


def _entry(
    name: str, entry: Any, located: Mapping[Any, Any], files: bool
) -> tuple[Stored | None, list[Piece]]:
    """An entry and its pieces."""
    if not hasattr(entry, "chunks"):
        return None, [_piece(name, None, located, None) if files else Piece()]
    dtype = entry.properties.dtype
    if not isinstance(dtype, torch.dtype) or not isinstance(entry.size, torch.Size):
        raise ValueError(f"{name[:80]!r} has no shape or no dtype")
    stored = Stored(tuple(entry.size), dtype)
    pieces = [_piece(name, chunk, located if files else None, stored) for chunk in entry.chunks]
    _check_cover(name, stored, pieces)
    return stored, pieces


def _piece(name: str, chunk: Any, located: Mapping[Any, Any] | None, stored: Any) -> Piece:
    offsets, sizes = (chunk.offsets, chunk.sizes) if chunk is not None else ((), ())
    if located is None:
        return Piece(tuple(offsets), tuple(sizes))
    info = located.get((name, chunk.offsets if chunk is not None else None))
    if info is None:
        raise ValueError(f"a piece of {name[:80]!r} is in no file")
    if info.transform_descriptors:
        raise CheckpointError(
            f"{name[:80]} is stored by way of {info.transform_descriptors}.",
            hint="Pass torch's FileSystemReader with the extensions that undo this, not a path.",
        )
    if stored is not None and prod(sizes) * stored.dtype.itemsize > info.length:
        raise ValueError(f"{name[:80]!r} has more elements than its {info.length} bytes")
    file = check_inside(info.relative_path)
    return Piece(
        tuple(offsets), tuple(sizes), file, info.offset, info.length, getattr(info, "crc32", None)
    )


def _check_cover(name: str, stored: Stored, pieces: Sequence[Piece]) -> None:
    """Raises unless the pieces have each element once."""
    shape = stored.shape
    for piece in pieces:
        ends = zip(piece.offsets, piece.sizes, shape, strict=True)
        if any(start < 0 or size < 0 or start + size > whole for start, size, whole in ends):
            raise ValueError(f"a piece of {name[:80]!r} leaves its shape {shape}")
    covered = sum(prod(piece.sizes) for piece in pieces)
    if covered < prod(shape):
        raise CheckpointError(
            f"{name[:80]} is stored in part: {covered} of {prod(shape)} elements are there.",
            stored=stored,
            hint="Write the checkpoint again: some rank had not written its pieces.",
        )
    if covered > prod(shape) or _overlap([p for p in pieces if prod(p.sizes)], len(shape)):
        raise ValueError(f"pieces of {name[:80]!r} overlap")


def _overlap(pieces: Sequence[Piece], dims: int) -> bool:
    """Whether two pieces share an element: those that begin in order are held against open ones."""
    if len(pieces) < 2:
        return False
    dim = max(range(dims), key=lambda d: len({p.offsets[d] for p in pieces}), default=None)
    if dim is None:
        return True
    open: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: p.offsets[dim]):
        open = [p for p in open if p.offsets[dim] + p.sizes[dim] > piece.offsets[dim]]
        if any(_meet(piece, other) for other in open):
            return True
        open.append(piece)
    return False


def _meet(a: Piece, b: Piece) -> bool:
    dims = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(i < j + m and j < i + n for i, n, j, m in dims)


def _paths(planner_data: Any) -> dict[str, Path]:
    """The keys of each name, where they are what torch writes."""
    if planner_data is None:
        return {}
    paths: dict[str, Path] = {}
    longest: dict[Path, int] = {}
    for name, path in planner_data.items():
        keys = tuple(path)
        if type(name) is not str or len(keys) > _DEPTH:
            raise ValueError("a name has no keys")
        for i, key in enumerate(keys):
            if type(key) is int and key >= 0:
                longest[keys[:i]] = max(longest.get(keys[:i], 0), key)
            elif type(key) is not str:
                raise ValueError(f"a key of {name[:80]!r} is no text or place")
        paths[name] = keys
    if sum(longest.values()) > 1000 + 10 * len(paths):
        raise ValueError("a list has far more entries than values")
    return paths
