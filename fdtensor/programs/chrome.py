"""`trace_events`: a timeline as Chrome's trace events, which Perfetto and TensorBoard show.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.expected import check_path
from fdtensor.programs.text import line_name

if TYPE_CHECKING:
    from fdtensor.ops.sources import Source
    from fdtensor.programs.timeline import Timed

__all__ = ["save", "trace_events"]

PROCESS = "estimate"
"""The name of the process, and its number, under which the events stand."""

LANES = ("compute", "network")

Event = dict[str, Any]


def trace_events(
    name: str, lines: Sequence[Timed], sources: Sequence[Source], start: float = 0.0
) -> list[Event]:
    """The lines of a program as events, which begin `start` seconds after the clock does."""
    at: Event = {"ph": "M", "pid": PROCESS}
    events = [at | {"name": "process_name", "args": {"name": f"{name}, estimated"}}]
    for tid, lane in enumerate(LANES):
        events.append(at | {"name": "thread_name", "tid": tid, "args": {"name": lane}})
    for line, source in zip(lines, sources, strict=True):
        sends = line.eqn.is_collective
        facts = {"result": " ".join(str(v) for v in line.eqn.outs if v is not None)}
        facts |= {"module": source.module, "line": source.line}
        events.append(
            {
                "ph": "X",
                "pid": PROCESS,
                "tid": LANES.index("network" if sends else "compute"),
                "name": line_name(line.eqn),
                "ts": 1e6 * (start + line.start),
                "dur": 1e6 * line.seconds,
                "args": {key: text for key, text in facts.items() if text},
            }
        )
    return events


def save(
    path: str | os.PathLike[str],
    name: str,
    lines: Sequence[Timed],
    sources: Sequence[Source],
    beside: str | os.PathLike[str] | None,
) -> None:
    """Writes events to a file, and those of `beside` with them.

    There the last run of the program begins when its estimate does.
    """
    check_path("path", path)
    if beside is not None:
        check_path("beside", beside)
    measured: dict[str, Any] = {} if beside is None else _read(beside)
    events: list[Event] = measured.get("traceEvents", [])
    runs = [e for e in events if e.get("name") == f"fdtensor {name}" and "ts" in e]
    start = max((float(event["ts"]) for event in runs), default=0.0) / 1e6
    if beside is not None and not runs:
        raise TraceError(
            f"{os.fspath(beside)!r} has no run of {name}.",
            hint="Run the program on a real mesh inside of torch.profiler.profile() as prof, then "
            "prof.export_chrome_trace(path).",
        )
    every = [*events, *trace_events(name, lines, sources, start)]
    text = json.dumps({**measured, "traceEvents": every})
    Path(path).write_bytes(gzip.compress(text.encode()) if _is_zipped(path) else text.encode())


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    trace: Any = {}
    try:
        content = Path(path).read_bytes()
        trace = json.loads(gzip.decompress(content) if _is_zipped(path) else content)
        problem = "" if isinstance(trace.get("traceEvents"), list) else "no list of traceEvents"
    except (ValueError, AttributeError, OSError, EOFError) as error:
        problem = str(error) or type(error).__name__
    if problem:
        raise TraceError(
            f"{os.fspath(path)!r} has no trace events.",
            problem=problem,
            hint="prof.export_chrome_trace(path) of torch.profiler writes such a file.",
        )
    return trace


def _is_zipped(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).endswith(".gz")
