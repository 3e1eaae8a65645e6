"""`measure`: seconds and memory of random draws by key, beside those of torch, on one thread."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import median

import attrs
import torch
from rich.console import Console
from rich.table import Table

from fdtensor import random
from tests.bench.timing import interleaved, one_thread, ratio

__all__ = ["FULL", "QUICK", "Drawn", "Effort", "Found", "measure", "show", "total"]


@attrs.frozen
class Effort:
    """How much a run measures."""

    elements: int
    """Of the draws that are timed."""
    rounds: int
    large: int
    """Elements of the draw whose memory is measured; 0 for none."""


FULL = Effort(1 << 20, rounds=40, large=1 << 26)
QUICK = Effort(1 << 18, rounds=8, large=1 << 23)


@attrs.frozen
class Drawn:
    """A draw of so many elements, by key and by torch."""

    name: str
    fdtensor_us: float
    torch_us: float
    ratio: float
    """The median over rounds in which both took turns."""
    peak: float | None
    """The memory that a process gains while it draws, over that of the result."""


@attrs.frozen
class Found:
    """What a run measured."""

    drawn: tuple[Drawn, ...]


Ways = tuple[Callable[[int], torch.Tensor], Callable[[int], torch.Tensor]]

KEY = random.key(0)

DRAWS: Mapping[str, Ways] = {
    "bits u32": (
        lambda n: random.bits(KEY, (n,)),
        lambda n: torch.empty(n, dtype=torch.int32).random_(),
    ),
    "uniform f32": (lambda n: random.uniform(KEY, (n,)), torch.rand),
    "normal f32": (lambda n: random.normal(KEY, (n,)), torch.randn),
    "uniform f64": (
        lambda n: random.uniform(KEY, (n,), dtype=torch.float64),
        lambda n: torch.rand(n, dtype=torch.float64),
    ),
    "normal f64": (
        lambda n: random.normal(KEY, (n,), dtype=torch.float64),
        lambda n: torch.randn(n, dtype=torch.float64),
    ),
    "normal bf16": (
        lambda n: random.normal(KEY, (n,), dtype=torch.bfloat16),
        lambda n: torch.randn(n, dtype=torch.bfloat16),
    ),
    "bernoulli": (
        lambda n: random.bernoulli(KEY, 0.1, (n,)),
        lambda n: torch.empty(n, dtype=torch.bool).bernoulli_(0.1),
    ),
    "randint i32": (
        lambda n: random.randint(KEY, (n,), 0, 1000, dtype=torch.int32),
        lambda n: torch.randint(0, 1000, (n,), dtype=torch.int32),
    ),
    "randint i64": (
        lambda n: random.randint(KEY, (n,), 0, 1000),
        lambda n: torch.randint(0, 1000, (n,)),
    ),
}
"""Each draw by key, and torch's own."""


def total() -> int:
    """How many ticks a run has."""
    return len(DRAWS)


def measure(effort: Effort, tick: Callable[..., None] = lambda *_: None) -> Found:
    """All draws; `tick(doing, done)` is called before each, and after it with done = 1."""
    found = []
    with one_thread():
        for name, (ours, theirs) in DRAWS.items():
            tick(name, 0)
            calls = {
                "fdtensor": lambda f=ours: f(effort.elements),
                "torch": lambda f=theirs: f(effort.elements),
            }
            taken = interleaved(calls, effort.rounds, 1)
            a, b = taken["fdtensor"], taken["torch"]
            peak = _peak(name, effort.large) if effort.large else None
            found.append(Drawn(name, median(a), median(b), ratio(a, b), peak))
            tick(name, 1)
    return Found(tuple(found))


def _peak(name: str, elements: int) -> float:
    """The memory of a draw over that of its result, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_gained, (name, elements))


def _gained(name: str, elements: int) -> float:
    ours = DRAWS[name][0]
    ours(1024)
    before = _most()
    made = ours(elements)
    return (_most() - before) / made.nbytes


def _most() -> int:
    """The most bytes of memory that this process has held."""
    with suppress(OSError), open("/proc/self/status") as file:
        # not getrusage, which goes on from the process that started this one
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def show(console: Console, found: Found) -> None:
    """The draws as a table."""
    console.print(_table(found.drawn))


def _table(rows: Sequence[Drawn]) -> Table:
    table = Table(title="random draws on one thread, us, medians", title_justify="left")
    for heading in ("draw", "fdtensor", "torch", "ratio", "peak / result"):
        table.add_column(heading, justify="left" if heading == "draw" else "right")
    for r in rows:
        peak = "" if r.peak is None else f"{r.peak:.2f}"
        table.add_row(r.name, f"{r.fdtensor_us:.0f}", f"{r.torch_us:.0f}", f"{r.ratio:.1f}", peak)
    return table
