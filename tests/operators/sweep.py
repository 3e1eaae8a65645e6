"""`sweep`: checks ops in child processes, so that a crash or a hang is told of and not shared.

A task is an op; a worker checks one after the other and sends what it found. Where it dies or takes
too long, the op has the result `crash` or `hang`, and another worker takes its place.
"""

from __future__ import annotations

import json
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs
import torch

from tests.operators.check import Checked, Result
from tests.operators.layouts import LINE, SQUARE, combinations
from tests.operators.samples import Sample, entries, parts_of, samples_of

__all__ = ["Extent", "check_op", "known", "sweep"]


@attrs.frozen
class Extent:
    """How much of an op is looked at."""

    samples: int = 6
    line: int = 24
    """Combinations of layouts on the mesh of 4."""
    square: int = 12
    """Combinations on the 2x2 mesh."""
    seed: int = 0
    dtype: str = "float32"
    seconds: float = 600.0
    """What an op may take before it counts as a hang."""
    form: str = "contiguous"
    """The memory format of blocks that can have it, of `tests.hunt.values.stored`, or `any`."""
    parts: bool = False
    """Whether it is the outputs of an op that are read alone, of those that have several."""


def check_op(name: str, extent: Extent) -> list[tuple[str, Result]]:
    """What came of each sample of an op on each combination of layouts."""
    torch.set_num_threads(1)
    dtype = getattr(torch, extent.dtype)
    op = entries(dtype)[name]
    derivatives = dtype in op.supported_backward_dtypes("cpu")
    found: list[tuple[str, Result]] = []
    samples = samples_of(name, extent.samples, dtype)
    if extent.parts:
        samples = [part for sample in samples for part in _parts(sample)]
    for i, sample in enumerate(samples):
        try:
            checked = Checked(sample, derivatives, extent.form)
        except Exception as error:
            found.append((sample.text, Result("none", text=f"the plain op: {error}"[:200])))
            continue
        for mesh, most in ((LINE, extent.line), (SQUARE, extent.square)):
            seed = (name, i, extent.seed)
            for layouts in combinations(sample.tensors, mesh, most, seed):
                result = checked.result(layouts)
                found.append((sample.text, result))
                if result.kind == "random":
                    return found
    return found or [("", Result("none", text="no tensor goes in"))]


def _parts(sample: Sample) -> list[Sample]:
    try:
        return parts_of(sample)
    except Exception:  # which the whole sample tells
        return [sample]


def _worker(pipe: Connection, extent: Extent) -> None:
    warnings.simplefilter("ignore")
    entries(getattr(torch, extent.dtype))
    pipe.send(None)
    while (name := pipe.recv()) is not None:
        pipe.send([(text, attrs.asdict(result)) for text, result in check_op(name, extent)])


@attrs.define
class _Worker:
    process: Any
    pipe: Connection
    name: str | None = None
    since: float = 0.0


def sweep(
    names: Iterable[str], extent: Extent, workers: int = 2
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The results of each op, as the workers finish them."""
    rest = list(names)
    context = multiprocessing.get_context("spawn")

    def started() -> _Worker:
        mine, theirs = context.Pipe()
        process = context.Process(target=_worker, args=(theirs, extent), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, mine, since=time.monotonic())

    crew = [started() for _ in range(min(workers, len(rest)))]
    try:
        while crew:
            ready = wait([w.pipe for w in crew], timeout=1.0)
            for worker in list(crew):
                said, name = None, worker.name
                if worker.pipe in ready:
                    try:
                        said = worker.pipe.recv()
                    except EOFError:
                        said = [_lost("crash", f"exit code {worker.process.exitcode}")]
                        _replaced(crew, worker, started if rest else None)
                elif name is not None and time.monotonic() - worker.since > extent.seconds:
                    said = [_lost("hang", f"more than {extent.seconds:.0f} s")]
                    _replaced(crew, worker, started if rest else None)
                else:
                    continue
                if name is not None and said is not None:
                    yield name, _rows(said)
                if worker in crew:
                    if rest:
                        worker.name, worker.since = rest.pop(0), time.monotonic()
                        worker.pipe.send(worker.name)
                    else:
                        worker.pipe.send(None)
                        crew.remove(worker)
    finally:
        for worker in crew:
            worker.process.kill()


def _replaced(crew: list[_Worker], worker: _Worker, started: Callable[[], _Worker] | None) -> None:
    worker.process.kill()
    crew.remove(worker)
    if started is not None:
        crew.append(started())


def _lost(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    return "", attrs.asdict(Result(kind, text=text))


def _rows(said: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [{"sample": text, **result} for text, result in said]


def known(path: Path, extent: Extent) -> dict[str, list[dict[str, Any]]]:
    """The results of this extent in a file of lines, by op."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    wanted = attrs.asdict(extent)
    default = {"form": "contiguous", "parts": False}
    return {
        line["op"]: line["results"] for line in lines if default | line.get("extent", {}) == wanted
    }
