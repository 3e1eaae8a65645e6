"""`python -m tests.bench control`: what it costs that ranks watch each other.

Each step runs on 4 gloo ranks with a Comm and with one that notes nothing, in turns. What a note
takes is measured by itself, in time of the thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import attrs
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import fdtensor as fd
from fdtensor.layouts.mesh import Mesh
from fdtensor.runtime.control.ledger import Ledger
from fdtensor.runtime.funcol import FuncolComm
from fdtensor.testing.pool import GlooPool

__all__ = ["FULL", "QUICK", "STEPS", "Effort", "Found", "Row", "measure", "show"]

MESH = Mesh(x=4)


@attrs.frozen
class Effort:
    """How much a run measures: rounds of so many calls."""

    rounds: int
    calls: int


FULL, QUICK = Effort(41, 20), Effort(5, 4)


@attrs.frozen
class Row:
    """A step in microseconds, watched and not, and the median of the ratios of pairs."""

    step: str
    watched: float
    alone: float
    ratio: float


@attrs.frozen
class Found:
    """What a run measured; the notes in microseconds."""

    rows: tuple[Row, ...]
    note: float
    note_with_line: float


class Unwatched(FuncolComm):
    """A Comm that notes no calls."""

    def watched(self, what: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def meet(self, about: str, mesh: Mesh) -> None:
        pass

    def note(self, about: str, numbers: Sequence[float], mesh: Mesh) -> None:
        pass


def _local(comm: Any) -> Callable[[], Any]:
    x = fd.distribute(torch.ones(256), MESH.layout("x"), comm)
    return lambda: fd.call(torch.neg, x)


def _redistribute(comm: Any) -> Callable[[], Any]:
    x = fd.distribute(torch.ones(512, 512), MESH.layout("x"), comm)
    return lambda: x.redistribute(MESH.layout(None, "x"))


def _full(comm: Any) -> Callable[[], Any]:
    x = fd.distribute(torch.ones(4096), MESH.layout("x"), comm)
    return x.full


def _step(comm: Any) -> Callable[[], Any]:
    """Loss, gradients and AdamW of an MLP, and its loss as a number."""
    x = fd.distribute(torch.randn(128, 256), MESH.layout("x"), comm)
    shapes = {"up": (256, 1024), "down": (1024, 256)}
    params = {
        n: fd.distribute(torch.randn(s) / 16, MESH.layout("x"), comm) for n, s in shapes.items()
    }
    optimizer = fd.optim.AdamW(lr=1e-3)
    state = optimizer.init(params)

    def loss(params: Any, x: Any) -> Any:
        return (torch.relu(x @ params["up"]) @ params["down"]).square().mean()

    value_and_grad = fd.spmd(torch.func.grad_and_value(loss))

    def step() -> float:
        grads, value = value_and_grad(params, x)
        optimizer.step(params, grads, state)
        return value.full().item()

    return step


STEPS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "call(neg), 256 B a rank": _local,
    "redistribute S(0) -> S(1), 1 MB": _redistribute,
    "full(), 16 kB": _full,
    "step of an MLP with AdamW": _step,
}


def measure(pool: GlooPool, effort: Effort, tick: Callable[..., None] = lambda *_: None) -> Found:
    """All steps on a pool of 4 ranks; `tick(doing, done)` as for the other benches."""
    rows = []
    for name in STEPS:
        tick(name, 0)
        rows.append(pool.run(_row, name, effort, timeout=900)[0])
        tick(name, 1)
    tick("notes", 0)
    notes = pool.run(_notes, timeout=300)[0]
    tick("notes", 1)
    return Found(tuple(rows), *notes)


def _row(name: str, effort: Effort) -> Row:
    """The row of a step, on one rank."""
    kinds: Sequence[Any] = (fd.connect(MESH), Unwatched(MESH))
    steps = [STEPS[name](comm) for comm in kinds]
    pairs = []
    for turn in range(effort.rounds + 2):
        took = [_timed(step, effort.calls) for step in steps]
        if turn > 1:
            pairs.append(took)
    first, second = zip(*pairs, strict=True)
    ratio = median(a / b for a, b in pairs)
    return Row(name, 1e6 * median(first), 1e6 * median(second), ratio)


def _timed(step: Callable[[], Any], calls: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


class _Plane:
    """A plane of no ranks."""

    tag = 0

    def __init__(self) -> None:
        self.store = dist.HashStore()  # type: ignore[attr-defined]


def _notes() -> tuple[float, float]:
    """Microseconds of a note, without and with the line of the user: the least of several."""
    plane: Any = _Plane()
    ledger = Ledger((0, 1), "bench", plane)
    least = []
    for sends in (False, True):
        took = []
        for _ in range(9):
            start = time.thread_time()
            for _ in range(10_000):
                ledger.begin(12345, "a call", sends)
                ledger.end()
            took.append((time.thread_time() - start) / 10_000)
        least.append(1e6 * min(took))
    return least[0], least[1]


def show(console: Console, found: Found) -> None:
    """A table of all steps, and the notes."""
    table = Table(title="4 gloo processes: microseconds, medians; the ratio is the median of pairs")
    for column in ("step", "watched", "not watched", "ratio"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for row in found.rows:
        table.add_row(row.step, f"{row.watched:.1f}", f"{row.alone:.1f}", f"{row.ratio:.3f}")
    console.print(table)
    both = f"{found.note:.2f} us, with the line of the user {found.note_with_line:.2f} us"
    console.print(f"A note takes {both}.")
