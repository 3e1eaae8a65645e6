"""`Stored` and `Contents`: the tensors and other objects that files hold, by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import attrs
import torch

from fdtensor.io.checkpoint.names import Path
from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.errors import CheckpointError
from fdtensor.layouts.words import shown
from fdtensor.plans.text import bytes_text

__all__ = ["Contents", "Stored", "checked_path"]


@attrs.frozen
class Stored:
    """A tensor in files, printed `f32[8,16]`."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"


@attrs.frozen(repr=False)
class Contents(Mapping[str, Stored | None]):
    """The contents of files by name: a `Stored`, or None for an object. Prints as a table."""

    entries: Mapping[str, Stored | None]
    paths: Mapping[str, Path] = attrs.field(factory=dict, eq=False)
    """The keys that were joined to a name, where that is known."""

    def __getitem__(self, name: str) -> Stored | None:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def path(self, name: str) -> Path:
        """The keys on the way to an entry: the whole name where they are not known."""
        return self.paths.get(name, (name,))

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        lines = [f"{name:<{width}}  {entry or 'object'}" for name, entry in sorted(self.items())]
        nbytes = sum(entry.nbytes for entry in self.values() if entry)
        entries = "entry" if len(self) == 1 else "entries"
        return "\n".join([*lines, f"{len(self)} {entries}, {bytes_text(nbytes)} of tensors"])


def checked_path(path: Any, name: str = "path") -> Any:
    """A path, the argument of this name; raises `CheckpointError` for what is none."""
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(
            f"{name}={shown(path)} is no path.",
            hint="Pass the path of a directory, as a str or a pathlib.Path.",
        )
    return path
