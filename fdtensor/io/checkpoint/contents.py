"""`checkpoint_contents`: what a checkpoint or safetensors files hold, read from headers alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fdtensor.io.checkpoint.stored import Contents, Stored
from fdtensor.layouts.errors import CheckpointError

__all__ = ["checkpoint_contents", "metadata_of", "of_metadata"]


def checkpoint_contents(path: Any) -> Contents:
    """The names, shapes and dtypes of what is stored at `path`.

    `path` is the directory of a checkpoint or a `StorageReader` of `torch.distributed.checkpoint`,
    or what `load_safetensors` takes. Raises `CheckpointError` where nothing is stored.

    >>> import tempfile
    >>> comm = connect(Mesh(x=2))
    >>> w = distribute(torch.ones(4, 3), comm.mesh.layout("x"), comm)
    >>> with tempfile.TemporaryDirectory() as path:
    ...     fd.save_checkpoint({"model": {"w": w}, "step": 10}, path, comm)
    ...     print(fd.checkpoint_contents(path))
    model.w  f32[4,3]
    step     object
    2 entries, 48 B of tensors
    """
    listed = isinstance(path, (list, tuple))
    if listed or (isinstance(path, (str, os.PathLike)) and _is_safetensors(Path(path))):
        from fdtensor.io.checkpoint.headers import headers

        return Contents({name: header.stored for name, header in headers(path).items()})
    return of_metadata(metadata_of(path)[1])


def _is_safetensors(path: Path) -> bool:
    named = path.name.endswith((".safetensors", ".safetensors.index.json"))
    return named or (not (path / ".metadata").exists() and any(path.glob("*.safetensors")))


def metadata_of(path: Any) -> tuple[Any, Any]:
    """The `StorageReader` of a checkpoint and its `Metadata`."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.storage import StorageReader

    reader = path if isinstance(path, StorageReader) else FileSystemReader(path)
    try:
        return reader, reader.read_metadata()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"there is no checkpoint at {str(path)!r}.",
            hint="A checkpoint is a directory with a file .metadata, which is written last; "
            "load_safetensors reads safetensors files.",
        ) from None


def of_metadata(metadata: Any) -> Contents:
    """The contents that the `Metadata` of a checkpoint tells."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries: dict[str, Stored | None] = {}
    for name, entry in metadata.state_dict_metadata.items():
        tensor = isinstance(entry, TensorStorageMetadata)
        entries[name] = Stored(tuple(entry.size), entry.properties.dtype) if tensor else None
    return Contents(entries, dict(metadata.planner_data or {}))
