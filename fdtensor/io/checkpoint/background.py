"""`Saving`: a save under way, whose writing goes on while the ranks compute.

Its thread sends nothing, so that no message of it meets those of the ranks: each rank leaves a note
in the directory when its file is written, and the first one waits for all notes.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fdtensor.io.checkpoint.together import relayed
from fdtensor.io.checkpoint.write import Job, Span
from fdtensor.layouts.errors import CheckpointError, FdtensorError
from fdtensor.runtime.comm import Comm
from fdtensor.runtime.control.process import plane_of

__all__ = ["Saving", "settled"]

PATIENCE = 300.0
"""For how many seconds the first rank waits while no file of another one grows."""

_UNDER_WAY: dict[tuple[int, ...] | None, Saving] = {}
"""The last save of each set of ranks, until somebody waited for it."""


class Saving:
    """A save that is under way; `save_checkpoint(..., wait=False)` gives one.

    The next save or load on the same ranks waits for it, and so does the end of Python.

    >>> import tempfile
    >>> comm = SimulatedComm(Mesh(x=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = fd.save_checkpoint({"step": 3}, folder, comm, wait=False)
    ...     saving.wait()
    ...     print(saving.done, fd.load_checkpoint(folder, {"step": 0}, comm))
    True {'step': 3}
    """

    def __init__(self, job: Job, comm: Comm[Any], what: str) -> None:
        self._job, self._comm, self._what = job, comm, what
        ranks = _ranks(comm)
        self._ledger = None if ranks is None else plane_of().ledger(ranks)
        self._spans: list[Span] = []
        self._problem: BaseException | None = None
        self._outcome: FdtensorError | bool | None = None
        self._written, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="fdtensor-save", daemon=False)
        _UNDER_WAY[ranks] = self
        self._thread.start()

    def __repr__(self) -> str:
        return f"Saving({str(self._job.folder)!r}, {'done' if self.done else 'under way'})"

    @property
    def done(self) -> bool:
        """Whether this rank is done; the first rank is when the checkpoint is in its place."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the checkpoint is in its place. Collective, but for the second time.

        Raises `CheckpointError` on all ranks if it could not be written on one, and `CommError` if
        one is gone.
        """
        if self._outcome is None:
            _UNDER_WAY.pop(_ranks(self._comm), None)
            try:
                relayed(self._comm, self._what, self._own, self._all)
                self._outcome = True
            except FdtensorError as error:
                self._outcome = error
                self._stop.set()
                self._thread.join()
                self._job.clean()
                _note(self._job, self._job.share.place).unlink(missing_ok=True)
        if isinstance(self._outcome, FdtensorError):
            raise self._outcome

    def warn(self) -> None:
        """Says if it failed on this rank, where nobody waits any more."""
        if self._problem is not None:
            warnings.warn(f"{self._what}: {self._problem}", stacklevel=2)

    # --- in the thread of the caller ---------------------------------------------------------

    def _own(self) -> None:
        """Waits until the file of this rank is written."""
        self._written.wait()
        if self._problem is not None:
            raise self._problem

    def _all(self, own: Sequence[None]) -> Sequence[None]:
        """Waits, on the first rank, until the checkpoint is in its place."""
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        return own

    # --- in the background -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._spans = self._job.write()
            if self._job.whole is None:
                _leave_note(self._job, self._spans)
            self._written.set()
            if self._job.whole is not None:
                self._job.finish(self._of_all())
        except BaseException as error:
            self._problem = error
        self._written.set()

    def _of_all(self) -> list[list[Span]]:
        """What all ranks wrote: the first one's own, and what the notes of the others say."""
        assert self._job.whole is not None
        spans: dict[int, list[Span]] = {0: self._spans}
        seen, since = -1, time.monotonic()
        places = range(len(self._job.whole.items))
        while missing := [place for place in places if place not in spans]:
            for place in missing:
                note = _note(self._job, place)
                if note.exists():
                    spans[place] = [tuple(span) for span in json.loads(note.read_text())]
            grown = sum(_size(file) for file in self._job.folder.glob(f"*{self._job.share.tag}*"))
            if grown != seen:
                seen, since = grown, time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                raise CheckpointError(
                    f"nothing was written for {PATIENCE:.0f} s, and {len(missing)} ranks are not "
                    "done.",
                    hint="Has a rank ended? Do all ranks write to one directory that they share?",
                )
            if missing[-1] not in spans and (self._stop.wait(0.01) or self._is_told()):
                raise CheckpointError("another rank could not write.")
        return [spans[place] for place in places]

    def _is_told(self) -> bool:
        """Whether the ranks have an error, so that not all of them will write."""
        return self._ledger is not None and self._ledger.stop


def settled(comm: Comm[Any]) -> None:
    """Waits for the save that is under way on the ranks of a Comm, if there is one. Collective."""
    saving = _UNDER_WAY.get(_ranks(comm))
    if saving is not None:
        saving.wait()


def _ranks(comm: Comm[Any]) -> tuple[int, ...] | None:
    return None if comm.rank is None else tuple(sorted(comm.mesh.order))


def _note(job: Job, place: int) -> Path:
    return job.folder / f"__{place}_{job.share.tag}.written"


def _leave_note(job: Job, spans: Sequence[Span]) -> None:
    note = _note(job, job.share.place)
    draft = note.with_suffix(".tmp")
    draft.write_text(json.dumps(spans))
    os.replace(draft, note)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


@atexit.register
def _tell() -> None:
    """Says at the end of Python which saves failed that nobody waited for."""
    for saving in _UNDER_WAY.values():
        saving.warn()
