"""`headers`: where safetensors files have each tensor, with its shape and dtype."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open

from fdtensor.io.checkpoint.catalog import check_inside
from fdtensor.io.checkpoint.folder import opened as _open
from fdtensor.io.checkpoint.stored import Stored, checked_path
from fdtensor.io.checkpoint.sums import Sums, json_of, sums_in
from fdtensor.layouts.dtypes import parse_dtype
from fdtensor.layouts.errors import CheckpointError, LayoutError

__all__ = ["DTYPES", "Header", "headers", "opened"]

_FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu"}
_NAMES = [
    "F64",
    "F32",
    "F16",
    "BF16",
    "I64",
    "I32",
    "I16",
    "I8",
    "U8",
    "U16",
    "U32",
    "U64",
    "BOOL",
    "C64",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "F8_E8M0",
]

_HINT = "Pass a .safetensors file, several, or a directory that has some."


def _dtype(name: str) -> torch.dtype | None:
    """The dtype that the format calls so; None where torch has none for single elements."""
    plain = name.lower().replace("f8_", "float8_")
    try:
        return parse_dtype(_FLOAT8.get(name, plain))
    except LayoutError:
        return None


DTYPES = {_dtype(name) for name in _NAMES} - {None}
"""The dtypes that the format has."""


@attrs.frozen
class Header:
    """A tensor of a safetensors file."""

    file: Path
    stored: Stored
    sums: Sums | None = None
    """The checksums of the file, where it has some."""


def headers(path: Any) -> dict[str, Header]:
    """The tensors of a file, of several files or of a directory, by name.

    Of a directory those that its `*.safetensors.index.json` lists, else of all files in it. Raises
    `CheckpointError` for a file that cannot be read, a name in two files, and an index that is not
    that of its files.
    """
    files, index = _files(path)
    known: dict[str, Header] = {}
    problems: dict[str, str] = {}
    saves: dict[str, Path] = {}
    for file in files:
        own = _headers_in(file, problems)
        for name, header in own.items():
            if name in known:
                problems[name] = f"is in {known[name].file} and in {file}"
            else:
                known[name] = header
            if header.sums is not None:
                saves[header.sums.save] = file
    if len(saves) > 1 and index:
        raise CheckpointError(
            f"the files at {str(path)!r} are of {len(saves)} saves.",
            **{f"save {save}": file for save, file in saves.items()},
            hint="A save was cut off. Name the files that you want.",
        )
    for name, file in index.items():
        if name not in problems and (name not in known or known[name].file != file):
            problems[name] = f"is not in {file}, where the index has it"
    if problems:
        raise CheckpointError(
            f"{len(problems)} of the names in these files cannot be told.",
            **problems,
            hint="Name the files of one model, each once.",
        )
    return {name: known[name] for name in index} if index else known


def _headers_in(file: Path, problems: dict[str, str]) -> dict[str, Header]:
    """The tensors of one file; those that cannot be are told among `problems`."""
    known: dict[str, Stored] = {}
    with opened(file) as tensors:
        for name in tensors.keys():  # noqa: SIM118
            part = tensors.get_slice(name)
            dtype = _dtype(part.get_dtype())
            if dtype is None:
                problems[name] = f"has dtype {part.get_dtype()}, which torch has not"
            else:
                known[name] = Stored(tuple(part.get_shape()), dtype)
        sums = sums_in(tensors.metadata(), known, file)
    return {name: Header(file, stored, sums) for name, stored in known.items()}


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file; its tensors are mapped to memory, and read where they are touched."""
    _open(file, _HINT).close()  # what is no plain file may wait for ever
    try:
        with safe_open(os.fspath(file), "pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{str(file)!r} cannot be read: {error}.",
            hint=_HINT,
        ) from None


def _files(path: Any) -> tuple[list[Path], dict[str, Path]]:
    """The files, each once, and the file of each name where there is an index."""
    if isinstance(path, (list, tuple)):
        return [Path(file) for file in dict.fromkeys(map(checked_path, path))], {}
    place = Path(checked_path(path))
    if place.is_dir():
        indices = sorted(place.glob("*.safetensors.index.json"))
        files = sorted(place.glob("*.safetensors"))
        if len(indices) != 1:
            if not files or indices:
                raise CheckpointError(
                    f"{str(path)!r} has {len(files)} safetensors files and {len(indices)} indices.",
                    hint="Pass the index or the files; load_checkpoint reads checkpoints.",
                )
            return files, {}
        place = indices[0]
    if place.suffix == ".json":
        try:
            weights = json_of(place.read_text())["weight_map"]
            if type(weights) is not dict or not weights:
                raise ValueError("it has no names")
            index = {name: place.parent / check_inside(file) for name, file in weights.items()}
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{str(place)!r} is no index of safetensors files: {error!r}.",
                hint='An index is JSON with the file of each name under "weight_map".',
            ) from None
        return sorted(set(index.values())), index
    return [place], {}
