"""`checkpoint_contents`: what a checkpoint or safetensors files hold, read from headers alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.storage import StorageReader

from fdtensor.io.checkpoint.catalog import Catalog, catalog
from fdtensor.io.checkpoint.folder import folder_at
from fdtensor.io.checkpoint.stored import Contents, checked_path
from fdtensor.layouts.errors import CheckpointError
from fdtensor.layouts.signatures import named_arguments

__all__ = ["checkpoint_contents", "reader_catalog"]


@named_arguments
def checkpoint_contents(path: Any) -> Contents:
    """The names, shapes and dtypes of what is stored at `path`.

    `path` is the directory of a checkpoint or a `StorageReader` of `torch.distributed.checkpoint`,
    or what `load_safetensors` takes. Nothing runs that a directory's metadata asks for; a reader
    reads in its own way. Raises `CheckpointError` where nothing is stored.

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
    if isinstance(path, StorageReader):
        return reader_catalog(path)[1].contents
    return folder_at(checked_path(path)).catalog.contents


def _is_safetensors(path: Path) -> bool:
    named = path.name.endswith((".safetensors", ".safetensors.index.json"))
    return named or (not (path / ".metadata").exists() and any(path.glob("*.safetensors")))


def reader_catalog(reader: StorageReader) -> tuple[Any, Catalog]:
    """What a `StorageReader` of torch reads: metadata, in its own way, and what it says."""
    metadata = _metadata_of(reader)
    return metadata, catalog(metadata, f"the metadata of {type(reader).__name__}", files=False)


def _metadata_of(reader: StorageReader) -> Any:
    try:
        return reader.read_metadata()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"there is no checkpoint for {type(reader).__name__}.",
            hint="A checkpoint is a directory with a file .metadata, which is written last.",
        ) from None
