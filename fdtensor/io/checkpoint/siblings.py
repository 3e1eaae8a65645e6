"""`latest_checkpoint`, and what `keep` leaves of the checkpoints beside the one that was saved."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fdtensor.io.checkpoint.folder import METADATA, folder_at, saved_at
from fdtensor.io.checkpoint.stored import checked_path
from fdtensor.io.checkpoint.together import relayed
from fdtensor.layouts.errors import CheckpointError
from fdtensor.runtime.comm import Comm

__all__ = ["check_keep", "latest_checkpoint", "prune"]

_NUMBERED = re.compile(r"(.*?)(\d+)", re.DOTALL)


def latest_checkpoint(folder: str | os.PathLike[str], comm: Comm[Any] | None = None) -> Path | None:
    """The directory in `folder` with the checkpoint that was saved last; None where there is none.

    Those that are damaged, cut off or not complete are passed over; what is in their pieces is not
    looked at. With `comm` it is collective, and all ranks get the answer of the first one.

    >>> import tempfile
    >>> comm = SimulatedComm(Mesh(x=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in range(4):
    ...         fd.save_checkpoint({"step": step}, f"{folder}/step_{step}", comm, keep=2)
    ...     print(fd.io.latest_checkpoint(folder).name)
    step_3
    """
    checked_path(folder, "folder")
    if comm is None:
        return _latest(Path(folder))
    what = f"the checkpoints in {str(folder)!r} cannot be looked at"
    count = 1 if comm.rank is None else comm.mesh.size
    return relayed(comm, what, lambda: None, lambda _: [_latest(Path(folder))] * count)


def _latest(folder: Path) -> Path | None:
    for path in _newest_first(folder.iterdir() if folder.is_dir() else iter(())):
        try:
            held = folder_at(path)
            held.check_files(piece for own in held.catalog.pieces.values() for piece in own)
        except (CheckpointError, OSError):
            continue
        return path
    return None


def check_keep(path: Any, keep: int | None) -> None:
    """Raises where `keep` has nothing to count."""
    if keep is None:
        return
    if type(keep) is not int or keep < 1:
        raise CheckpointError(
            f"{keep!r} checkpoints cannot be kept.", hint="keep is a count, 1 or more."
        )
    if not isinstance(path, (str, os.PathLike)) or not _NUMBERED.fullmatch(Path(path).name):
        raise CheckpointError(
            f"{str(path)!r} has no number at its end, so keep={keep} cannot tell which are older.",
            hint="Save to f'{folder}/step_{step:06}', each step to a directory of its own.",
        )


def prune(path: Path, keep: int) -> None:
    """Deletes all but the newest `keep` checkpoints whose names differ from this by a number."""
    match = _NUMBERED.fullmatch(path.name)
    assert match is not None
    alike = re.compile(re.escape(match[1]) + r"\d+")
    others = (p for p in path.parent.iterdir() if p != path and alike.fullmatch(p.name))
    for old in list(_newest_first(others))[keep - 1 :]:
        _delete(old)


def _newest_first(paths: Iterator[Path]) -> Iterator[Path]:
    """Of these those that are checkpoints, by when they were saved."""
    times = {p: time for p in paths if (time := saved_at(p)) is not None}
    yield from sorted(times, key=lambda p: (times[p], p.name), reverse=True)


def _delete(path: Path) -> None:
    """Deletes a checkpoint: what makes it one first, the directory if nothing else is in it."""
    (path / METADATA).unlink(missing_ok=True)
    for file in path.glob("*.distcp"):
        file.unlink(missing_ok=True)
    with suppress(OSError):
        path.rmdir()
