"""`python -m tests.bench checkpoint`: saving and loading beside torch.distributed.checkpoint.

On 4 gloo ranks, in turns, each save to a directory of its own: with the files on the disk before a
save returns, which is the default of both, and without. What is loaded was just written, so that
it is in memory and loading measures no disk.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fdtensor as fd
from fdtensor.layouts.mesh import Mesh
from fdtensor.testing.pool import GlooPool

__all__ = ["FULL", "QUICK", "Effort", "Found", "Row", "State", "measure", "show"]


@attrs.frozen
class State:
    """Tensors that are saved: so many of one shape, in shards of dim 0 or on every rank."""

    name: str
    count: int
    shape: tuple[int, int]
    cut: bool = True

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, of 32 bits."""
        return 4 * self.count * self.shape[0] * self.shape[1]


@attrs.frozen
class Effort:
    """How much a run measures."""

    states: tuple[State, ...]
    rounds: int


FULL = Effort(
    (
        State("4 large", 4, (4096, 1024)),
        State("300 small", 300, (64, 64)),
        State("4 large, on every rank", 4, (4096, 1024), cut=False),
    ),
    rounds=15,
)
QUICK = Effort(FULL.states[:2], rounds=4)


@attrs.frozen
class Row:
    """What a step takes with both, in milliseconds, and the median of the ratio of pairs."""

    state: str
    step: str
    ours: float
    theirs: float
    ratio: float


@attrs.frozen
class Found:
    """What a run measured."""

    rows: tuple[Row, ...]


def measure(pool: GlooPool, effort: Effort, tick: Callable[..., None] = lambda *_: None) -> Found:
    """All states on a pool of 4 ranks; `tick(doing, done)` as for the other benches."""
    rows: list[Row] = []
    for state in effort.states:
        tick(state.name, 0)
        with tempfile.TemporaryDirectory() as folder:
            rows += pool.run(_rows, state, effort.rounds, Path(folder), timeout=900)[0]
        tick(state.name, 1)
    return Found(tuple(rows))


def _rows(state: State, rounds: int, folder: Path) -> list[Row]:
    """The rows of a state, on one rank."""
    warnings.simplefilter("ignore")
    comm = fd.connect(Mesh(x=4))
    layout = comm.mesh.layout("x" if state.cut else None)
    device_mesh = init_device_mesh("cpu", (4,))
    placements = [Shard(0) if state.cut else Replicate()]
    full = [torch.randn(state.shape) for _ in range(state.count)]
    for tensor in full:
        dist.broadcast(tensor, 0)
    ours = {f"layers.{i}.w": fd.distribute(x, layout, comm) for i, x in enumerate(full)}
    theirs = {
        f"layers.{i}.w": distribute_tensor(x, device_mesh, placements) for i, x in enumerate(full)
    }
    like = dict.fromkeys(ours, layout)
    spent: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds + 2):
        for step, pair in _steps(ours, theirs, like, comm, folder).items():
            took = tuple(map(_timed, pair))
            if turn > 1:
                spent.setdefault(step, []).append(took)  # type: ignore[arg-type]
        dist.barrier()
        if comm.rank == 0:
            for path in folder.iterdir():
                shutil.rmtree(path)
        dist.barrier()
    return [
        Row(
            state.name,
            step,
            *(median(column) for column in zip(*pairs, strict=True)),
            median(a / b for a, b in pairs),
        )
        for step, pairs in spent.items()
    ]


def _steps(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], like: Any, comm: Any, folder: Path
) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """What is timed: each step with fdtensor and with torch."""

    def save(name: str, **options: Any) -> Callable[[], Any]:
        return lambda: fd.save_checkpoint(dict(ours), folder / name, comm, **options)

    def dcp_save(name: str, sync: bool) -> Callable[[], Any]:
        def run() -> None:
            writer = dcp.FileSystemWriter(folder / name, sync_files=sync)
            dcp.save(dict(theirs), storage_writer=writer)

        return run

    return {
        "save": (save("a"), dcp_save("b", True)),
        "save, sync_files=False": (save("c", sync_files=False), dcp_save("d", False)),
        "save, comparing nothing": (
            save("e", sync_files=False, on_difference="ignore"),
            dcp_save("f", False),
        ),
        "load": (
            lambda: fd.load_checkpoint(folder / "a", like, comm),
            lambda: dcp.load(dict(theirs), checkpoint_id=folder / "b"),
        ),
        "save, until wait=False returns": (save("g", wait=False), dcp_save("h", True)),
    }


def _timed(act: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    result = act()
    dist.barrier()
    took = 1e3 * (time.perf_counter() - start)
    if isinstance(result, fd.io.Saving):
        result.wait()
    return took


def show(console: Console, found: Found) -> None:
    """A table of all steps."""
    table = Table(title="4 gloo processes: ms, medians; the ratio is the median of pairs")
    for column in ("state", "step", "fdtensor", "torch", "fdtensor / torch"):
        table.add_column(column, justify="left" if column in ("state", "step") else "right")
    for row in found.rows:
        times = (f"{row.ours:.1f}", f"{row.theirs:.1f}", f"{row.ratio:.2f}")
        table.add_row(row.state, row.step, *times)
    console.print(table)
