"""`listen`: the answers of the ranks to a call, and what they print until then."""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from fdtensor.cluster.failures import Failure, failure
from fdtensor.cluster.output import Lines, Stream, show
from fdtensor.cluster.processes import Worker, ended

__all__ = ["listen", "places"]

_PLACE_SECONDS = 2.0
"""How long ranks that are late have to say where they are."""

_PIPE_BYTES = 1 << 20
"""The most that a pipe holds."""


def listen(workers: Sequence[Worker], timeout: float, grace: float) -> tuple[dict[int, Any], str]:
    """The answer of each rank, or its `Failure`, and how long the caller waited.

    Shows what they print meanwhile. When one has failed, the others have `grace` seconds.
    """
    rank_of = {worker.pipe: rank for rank, worker in enumerate(workers)}
    streams = _streams(workers)
    lines = Lines(len(workers))
    answers: dict[int, Any] = {}
    latest = deadline = time.monotonic() + timeout
    try:
        while rank_of and (left := deadline - (now := time.monotonic())) > 0:
            flush_at = lines.due()
            left = left if flush_at is None else min(left, max(flush_at - now, 0))
            for source in wait([*rank_of, *streams], None if left == math.inf else left):
                if source in streams:
                    if not _copy(source, *streams[source], lines):
                        del streams[source]
                    continue
                rank = rank_of.pop(source)  # type: ignore[arg-type]
                answers[rank] = _read(workers[rank])
                _finish(rank, streams, lines)
                if isinstance(answers[rank], Failure):
                    deadline = min(deadline, time.monotonic() + grace)
            show(lines.ready(time.monotonic()))
    finally:
        for rank in range(len(workers)):
            _finish(rank, streams, lines)
        show(lines.ready(time.monotonic()))
    return answers, f"{grace:g} s later" if deadline < latest else f"in {timeout:g} s"


def places(workers: Sequence[Worker], ranks: Sequence[int]) -> dict[int, str]:
    """Where the calls of these ranks are, as tracebacks."""
    texts: dict[int, str] = {}
    waiting = {workers[rank].pipe: rank for rank in ranks}
    end = time.monotonic() + _PLACE_SECONDS
    for pipe in list(waiting):
        try:
            pipe.send_bytes(b"")
        except OSError:
            del waiting[pipe]
    while waiting and (left := end - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            try:
                answer = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):
                answer = ""
            if isinstance(answer, str):  # and not an answer that comes too late
                texts[waiting.pop(pipe)] = answer  # type: ignore[arg-type]
    return {rank: where for rank, where in texts.items() if where}


def _read(worker: Worker) -> Any:
    """The answer of a rank, or the `Failure` that it was."""
    try:
        return pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, ConnectionError):
        how = ended(worker.process)
        return Failure(how, how)
    except Exception as error:
        return failure(error)


def _streams(workers: Sequence[Worker]) -> dict[Any, tuple[int, Stream]]:
    """The outputs of the ranks, each with its rank and name."""
    streams: dict[Any, tuple[int, Stream]] = {}
    for rank, worker in enumerate(workers):
        if worker.process.stdout and worker.process.stderr:
            streams[worker.process.stdout] = rank, "stdout"
            streams[worker.process.stderr] = rank, "stderr"
    return streams


def _copy(file: Any, rank: int, name: Stream, lines: Lines) -> bool:
    """Takes what has been written; False at the end of the stream."""
    try:
        data = os.read(file.fileno(), _PIPE_BYTES)
    except BlockingIOError:
        return True
    lines.take(rank, name, data, time.monotonic())
    return bool(data)


def _finish(rank: int, streams: Mapping[Any, tuple[int, Stream]], lines: Lines) -> None:
    """Takes what a rank has written before it answered."""
    for file, (whose, name) in streams.items():
        if whose == rank:
            _copy(file, rank, name, lines)
    lines.close(rank, time.monotonic())
