"""Where safetensors files are written: beside old ones at first, and not where others are."""

from __future__ import annotations

import re
from pathlib import Path

from fdtensor.layouts.errors import CheckpointError

__all__ = ["draft", "old_files", "refuse_place"]

_OWN = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
"""The names of the files that a save to a directory writes."""


def refuse_place(target: Path, overwrite: bool) -> None:
    """Raises `CheckpointError` where old files are in the way, or files of others."""
    if not overwrite and old_files(target):
        raise CheckpointError(
            f"there are safetensors files at {str(target)!r} already.",
            hint="Save to another place, or pass overwrite=True.",
        )
    if target.suffix == ".safetensors":
        if target.is_dir():
            raise CheckpointError(
                f"{str(target)!r} is a directory, but its name is that of a file.",
                hint="Save to a directory without .safetensors in its name, or to a file in it.",
            )
        return
    others = [file.name for file in old_files(target) if not _OWN.fullmatch(file.name)]
    if others:
        raise CheckpointError(
            f"there are other safetensors files at {str(target)!r}, which a load of the directory "
            "would read too.",
            files=", ".join(sorted(others)),
            hint="Save to another place, or move them away first.",
        )


def old_files(target: Path) -> list[Path]:
    """The files that a new set would replace, the index first."""
    if target.suffix == ".safetensors":
        return [target] if target.exists() else []
    return [*target.glob("*.safetensors.index.json"), *target.glob("*.safetensors")]


def draft(path: Path) -> Path:
    """Where a file is written before it takes the place of an old one."""
    return path.with_name(f"{path.name}.tmp")
