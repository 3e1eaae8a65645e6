"""`WorkerError`: a call that failed on some ranks, told once for ranks on which it was the same."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Mapping

import attrs

from fdtensor.layouts.text import spans

__all__ = ["Failure", "WorkerError", "failure", "grouped", "in_step"]

_LOST = "The ranks are stopped. What they kept is lost; the next run starts new ones."
_HERE = os.path.dirname(__file__) + os.sep


class WorkerError(RuntimeError):
    """A call that failed on some ranks: one sentence, then the traceback of each that raised.

    `failures` says what happened on each of those ranks, the first to fail first, and `errors` has
    the exceptions themselves, where they can travel. `lost` is whether the ranks had to be stopped.

    >>> with local_cluster(2) as cluster:
    ...     cluster.run(lambda: 1 // cluster.rank)
    Traceback (most recent call last):
        ...
    fdtensor.cluster.failures.WorkerError: rank 0 raised ZeroDivisionError: ...
    ...
    """

    def __init__(
        self,
        sentence: str,
        failures: Mapping[int, str],
        errors: Mapping[int, BaseException] | None = None,
        lost: bool = False,
    ) -> None:
        super().__init__(sentence, failures, errors, lost)
        self.sentence = sentence
        self.failures = failures
        self.errors: Mapping[int, BaseException] = errors or {}
        self.lost = lost

    def __str__(self) -> str:
        groups = grouped({rank: text for rank, text in self.failures.items() if "\n" in text})
        stories = [f"On {ranks}:\n{text}" for ranks, text in groups]
        return "\n\n".join([self.sentence, *stories, *[_LOST] * self.lost])


@attrs.frozen
class Failure:
    """A failure on a rank: the end of a sentence, the traceback, and the pickled error."""

    what: str
    text: str
    error: bytes = b""

    @property
    def raised(self) -> str:
        """The kind of error that the rank raised; empty if it raised none."""
        return self.what.partition(":")[0] if self.what.startswith("raised ") else ""


def failure(error: BaseException, pickled: bytes = b"") -> Failure:
    """The failure of a rank that raised `error`: its kind and first line, and its traceback.

    The traceback is without the frames of this package.
    """
    first = str(error).partition("\n")[0]
    trace = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in trace.stack if not frame.filename.startswith(_HERE)]
    trace.stack = traceback.StackSummary.from_list(frames)
    return Failure(
        f"raised {type(error).__name__}" + (f": {first}" if first else ""),
        "".join(trace.format()).rstrip(),
        pickled,
    )


def in_step(failures: Iterable[Failure]) -> bool:
    """Whether ranks raised the same kind of error, so that none waits for another."""
    kinds = {failed.raised for failed in failures}
    return len(kinds) == 1 and "" not in kinds


def grouped(texts: Mapping[int, str]) -> list[tuple[str, str]]:
    """Each text, after the ranks that have it: `[("ranks 0-3", text)]`."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(rank)
    return [
        (f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks, ', ')}", text)
        for text, ranks in groups.items()
    ]
