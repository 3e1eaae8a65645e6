"""`python -m tests.bench overlap`: how much of what programs send is waited for.

By the timelines of large programs, with the lines in the order of the function and as they are
scheduled; nothing is computed. And the wall time of a step on 4 gloo processes, in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import fdtensor as fd
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.cost import GLOO, H100, NCCL, CostModel
from fdtensor.programs.program import Eqn, Program
from fdtensor.programs.timeline import timeline
from fdtensor.programs.tracer import trace
from fdtensor.testing.pool import GlooPool
from tests.bench.choice_cases import CASES as LARGE
from tests.bench.choice_cases import LAYERED

__all__ = ["FULL", "QUICK", "Effort", "Found", "Overlap", "Wall", "in_order", "measure", "show"]


@attrs.frozen
class Effort:
    """How much a run measures."""

    cases: tuple[str, ...]
    """The names of cases; those of the choice bench with one mesh of theirs."""
    calls: int
    """How often a step is timed."""


@attrs.frozen
class Overlap:
    """A program by its own cost model, in milliseconds."""

    case: str
    cost: str
    computing: float
    sending: float
    before: float
    """What it takes in the order of its function."""
    after: float
    """What it takes as it is scheduled."""
    peak_before: int
    peak_after: int

    def exposed(self, took: float) -> float:
        """The part of what is sent that is waited for, in a program that takes so long."""
        return max(0.0, took - self.computing) / self.sending

    @property
    def ideal(self) -> float:
        """The part that no order hides: there is less to compute than to send."""
        return max(0.0, self.sending - self.computing) / self.sending


@attrs.frozen
class Wall:
    """A step on real ranks, in milliseconds."""

    case: str
    before: float
    after: float
    said: float
    """The part of the time that the cost model says a schedule takes."""


@attrs.frozen
class Found:
    """What a run measured."""

    overlaps: tuple[Overlap, ...]
    walls: tuple[Wall, ...]


def in_order(program: Program) -> Program:
    """The same program with each collective just before the first line that reads its result."""
    eqns: list[Eqn] = []
    waiting: list[Eqn] = []
    for eqn in program.eqns:
        if eqn.is_collective:
            waiting.append(eqn)
            continue
        _wanted(eqn, waiting, eqns)
        eqns.append(eqn)
    return attrs.evolve(program, eqns=(*eqns, *waiting))


def _wanted(eqn: Eqn, waiting: list[Eqn], eqns: list[Eqn]) -> None:
    """Moves the collectives that a line needs, and those that these need, to the lines."""
    for sent in [line for line in waiting if set(line.outs) & set(eqn.ins)]:
        if sent in waiting:
            waiting.remove(sent)
            _wanted(sent, waiting, eqns)
            eqns.append(sent)


# --- programs ------------------------------------------------------------------------------------


def _typed(shape: tuple[int, ...], layout: Layout, dtype: torch.dtype) -> TensorType:
    return TensorType(shape, dtype, layout)


def _mlp(params: Any, x: torch.Tensor) -> torch.Tensor:
    for up, down in params:
        x = x + F.gelu(x @ up) @ down
    return x.float().square().mean()


def _attention(p: Any, x: torch.Tensor) -> torch.Tensor:
    heads = [(x @ p[n]).unflatten(-1, (16, -1)).transpose(1, 2) for n in "qkv"]
    seen = F.scaled_dot_product_attention(*heads, is_causal=True)
    return (x + seen.transpose(1, 2).flatten(2) @ p["out"]).float().square().mean()


def _normed(params: Any, x: torch.Tensor) -> torch.Tensor:
    for up, down in params:
        x = x + F.gelu(F.layer_norm(x, (x.shape[-1],)) @ up) @ down
    return x.float().square().mean()


def _experts(p: Any, x: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
    taken = torch.einsum("sec,sm->ecm", routes, x)
    hidden = F.gelu(torch.einsum("ecm,emh->ech", taken, p["up"]))
    given = torch.einsum("ech,ehm->ecm", hidden, p["down"])
    return torch.einsum("sec,ecm->sm", routes, given).float().square().mean()


def _layers(layout: Layout, other: Layout, count: int, dtype: torch.dtype) -> Any:
    shapes = ((2048, 8192), layout), ((8192, 2048), other)
    return [tuple(_typed(shape, where, dtype) for shape, where in shapes) for _ in range(count)]


def _small(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function of a case and the types of its arguments."""
    bf16, x, axis = torch.bfloat16, (16, 2048, 2048), "tp"
    mesh = Mesh(tp=8)
    columns, rows, whole = mesh.layout(None, axis), mesh.layout(axis), mesh.layout()
    if name.startswith("FSDP"):
        return _mlp, (_layers(rows, rows, 6, bf16), _typed((65536, 2048), rows, bf16))
    if name == "MoE":
        experts = {
            "up": _typed((8, 1024, 4096), rows, bf16),
            "down": _typed((8, 4096, 1024), rows, bf16),
        }
        routes = _typed((8192, 8, 256), rows, bf16)
        return _experts, (experts, _typed((8192, 1024), rows, bf16), routes)
    if name == "attention":
        params = {n: _typed((2048, 2048), columns, bf16) for n in "qkv"}
        params["out"] = _typed((2048, 2048), rows, bf16)
        return _attention, (params, _typed(x, whole, bf16))
    return _normed, (_layers(columns, rows, 4, bf16), _typed(x, columns, bf16))


SMALL = (
    "FSDP, 6 layers",
    "FSDP, 6 layers, gathered again",
    "attention",
    "sequence parallel",
    "MoE",
)


def _program(name: str, cost: CostModel) -> Program:
    again = name.endswith("gathered again")
    if name in SMALL:
        f, types = _small(name)
        return trace(torch.func.grad(f), *types, cost=cost, regather=again)
    (case,) = (c for c in (*LARGE, *LAYERED) if c.name == name.removesuffix(", gathered again"))
    mesh = case.meshes[0] if again else case.meshes[1]
    return trace(case.f, *case.types(mesh), cost=cost, regather=again)


LLAMA = "8 layers of Llama-3-8B, gradient"
FULL = Effort((*SMALL, "a layer of Llama-3-8B, gradient", f"{LLAMA}, gathered again"), calls=41)
QUICK = Effort(SMALL[:2], calls=3)


def measure(pool: GlooPool, effort: Effort, tick: Callable[..., None] = lambda *_: None) -> Found:
    """All cases, and steps on a pool of 4 ranks; `tick(doing, done)` as for the other benches."""
    overlaps: list[Overlap] = []
    for name in effort.cases:
        tick(name, 0)
        overlaps += [_overlap(name, cost) for cost in (NCCL, H100)]
        tick(name, 1)
    tick("steps on gloo", 0)
    walls = pool.run(_walls, effort.calls, timeout=600)[0]
    tick("steps on gloo", 1)
    return Found(tuple(overlaps), tuple(walls))


def _overlap(name: str, cost: CostModel) -> Overlap:
    program = _program(name, cost)
    before, after = timeline(in_order(program), cost), timeline(program, cost)
    times = (after.computing, after.sending, before.seconds, after.seconds)
    peaks = in_order(program).peak_bytes, program.peak_bytes
    return Overlap(name, cost.name, *(1e3 * t for t in times), *peaks)


# --- real ranks ----------------------------------------------------------------------------------


def _walls(calls: int) -> list[Wall]:
    """Steps of an FSDP MLP on one rank, without and with overlap, in turns."""
    mesh = Mesh(fs=4)
    comm = fd.connect(mesh, cost=GLOO)
    cut = mesh.layout("fs")
    walls: list[Wall] = []
    for rows in (512, 2048):
        shapes = ((512, 2048), (2048, 512))
        params = [tuple(_typed(s, cut, torch.float32) for s in shapes) for _ in range(4)]
        x = _typed((rows, 512), cut, torch.float32)
        program = trace(torch.func.grad(_mlp), params, x, cost=GLOO, regather=True)
        both = in_order(program), program
        values = [torch.randn(t.local_shape(comm.rank)) / 32 for t in program.in_types]
        spent: list[list[float]] = [[], []]
        for turn in range(calls + 2):
            for i, one in enumerate(both):
                dist.barrier()
                start = time.perf_counter()
                fd.run(one, values, comm)
                dist.barrier()
                if turn > 1:
                    spent[i].append(1e3 * (time.perf_counter() - start))
        before, after = (timeline(one, GLOO).seconds for one in both)
        took = map(median, spent)
        walls.append(Wall(f"FSDP, 4 layers, {rows} rows", *took, after / before))
    return walls


def show(console: Console, found: Found) -> None:
    """Two tables: by timelines, and on real ranks."""
    table = Table(title="by the program's timeline: ms, and the part of sending that is waited for")
    for column in ("case", "cost"):
        table.add_column(column)
    columns = ("compute", "send", "in order", "scheduled", "exposed in order", "exposed", "ideal")
    for column in (*columns, "peak"):
        table.add_column(column, justify="right")
    for row in found.overlaps:
        times = (row.computing, row.sending, row.before, row.after)
        parts = (row.exposed(row.before), row.exposed(row.after), row.ideal)
        table.add_row(
            *(row.case, row.cost, *(f"{t:.2f}" for t in times), *(f"{p:.0%}" for p in parts)),
            f"{row.peak_after / row.peak_before:.2f}",
        )
    console.print(table)
    table = Table(title="4 gloo processes: ms of a step, medians")
    for column in ("step", "in order", "scheduled", "ratio", "ratio by the model"):
        table.add_column(column, justify="right" if column != "step" else "left")
    for wall in found.walls:
        ratio = f"{wall.after / wall.before:.2f}"
        table.add_row(
            wall.case, f"{wall.before:.1f}", f"{wall.after:.1f}", ratio, f"{wall.said:.2f}"
        )
    console.print(table)
