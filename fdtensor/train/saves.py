"""`Saves`: the checkpoints of a job, from the last of which it goes on after a fault."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs

from fdtensor.io.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from fdtensor.io.checkpoint.background import settled
from fdtensor.layouts.errors import CheckpointError
from fdtensor.runtime.comm import Comm

__all__ = ["Saves"]


@attrs.frozen
class Saves:
    """A checkpoint in `folder` after every so many steps, of which the last ones are kept.

    They are written while the job goes on. The mesh may be another one when it starts again, of
    other ranks and axes.
    """

    folder: str | os.PathLike[str]
    every: int = 20
    keep: int = 2

    def __attrs_post_init__(self) -> None:
        if self.every < 1:
            raise CheckpointError(
                f"a job cannot save every {self.every} steps.", hint="Give an int, 1 or more."
            )

    def last(self, trained: Any, about: str, comm: Comm[Any]) -> tuple[int, Any]:
        """The step to go on at, and what is trained by then.

        Step 0 and `trained` where there is none. Raises `CheckpointError` for one of another job:
        `about` says what makes two alike. Collective.
        """
        path = latest_checkpoint(self.folder, comm)
        if path is None:
            return 0, trained
        facts = load_checkpoint(path, {"step": 0, "job": ""}, comm, strict=False)
        if facts["job"] != about:
            raise CheckpointError(
                f"the checkpoint at {str(path)!r} is of another job.",
                saved=facts["job"],
                asked=about,
                hint="Give the options that it had, or another directory.",
            )
        loaded = load_checkpoint(path, {"trained": trained}, comm, strict=False)
        return facts["step"], loaded["trained"]

    def after(self, step: int, trained: Any, about: str, comm: Comm[Any]) -> None:
        """Begins a checkpoint if one is due after so many steps. Collective."""
        if step % self.every == 0:
            path = Path(self.folder) / f"step_{step:06}"
            tree = {"trained": trained, "step": step, "job": about}
            save_checkpoint(tree, path, comm, overwrite=True, keep=self.keep, wait=False)

    def end(self, comm: Comm[Any]) -> None:
        """Waits for the last checkpoint. Collective."""
        settled(comm)
