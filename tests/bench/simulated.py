"""`python -m tests.bench simulator`: all ranks of a mesh in one process, beside a single one.

A transformer block with its gradients, in the layouts of tensor and data parallelism, on more and
more simulated ranks: what a call takes over the same block of one process, and what PyTorch's
`LocalTensorMode` takes with the same layouts; then single collectives among many ranks.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.spmd import spmd
from tests.bench.models import BLOCK
from tests.bench.timing import one_thread

__all__ = [
    "FULL",
    "QUICK",
    "Block",
    "Effort",
    "Found",
    "Reduced",
    "Size",
    "measure",
    "show",
    "total",
]


@attrs.frozen
class Size:
    """A mesh, and a block of `times` the widths on `times` the tokens."""

    dp: int
    tp: int
    times: int = 1
    beside: bool = False
    """Whether `LocalTensorMode` is timed too."""


@attrs.frozen
class Effort:
    """How much a run measures."""

    sizes: tuple[Size, ...]
    reducing: int
    """The ranks of the single collectives."""
    rounds: int


SMALL = Size(2, 2, beside=True), Size(8, 8, beside=True), Size(16, 16), Size(128, 8)
FULL = Effort((*SMALL, Size(8, 8, times=4)), reducing=256, rounds=5)
QUICK = Effort((Size(2, 2), Size(8, 8)), reducing=64, rounds=2)


@attrs.frozen
class Block:
    """The gradients of a block on a simulated mesh: the least seconds of CPU of some calls."""

    size: Size
    alone: float
    """Of the same batch in one process."""
    first: float
    """Of the first call, in which layouts are chosen."""
    simulated: float
    theirs: float | None
    """Of PyTorch's `LocalTensorMode`."""


@attrs.frozen
class Reduced:
    """A collective of f32[512,64] among simulated ranks, in seconds of CPU."""

    name: str
    ranks: int
    seconds: float


@attrs.frozen
class Found:
    """What a run measured."""

    blocks: tuple[Block, ...]
    collectives: tuple[Reduced, ...]


def total(effort: Effort) -> int:
    """How many ticks a run has."""
    return len(effort.sizes) + 1


def measure(effort: Effort, tick: Callable[..., None] = lambda *_: None) -> Found:
    """All cases; `tick(doing, done)` is called before each, and after it with done = 1."""
    blocks = []
    with one_thread():
        for size in effort.sizes:
            tick(f"{size.dp * size.tp} ranks", 0)
            theirs = _theirs(size, effort.rounds) if size.beside else None
            blocks.append(_block(size, effort.rounds, theirs))
            tick("", 1)
        tick("collectives", 0)
        collectives = _collectives(effort.reducing, effort.rounds)
        tick("", 1)
    return Found(tuple(blocks), collectives)


def _least(call: Callable[[], Any], rounds: int) -> float:
    """The least seconds of CPU of some calls."""
    taken = []
    for _ in range(rounds):
        begun = time.process_time()
        call()
        taken.append(time.process_time() - begun)
    return min(taken)


def _tensors(size: Size) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Parameters, and a batch of two for each rank along dp."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn([size.times * n for n in shape], generator=generator)

    params = {name: 0.1 * normal(*shape) for name, shape in BLOCK.shapes.items()}
    return params, normal(*BLOCK.x[1:]).expand(2 * size.dp, -1, -1).clone()


def _block(size: Size, rounds: int, theirs: float | None) -> Block:
    params, x = _tensors(size)
    gradients = torch.func.grad(BLOCK.loss)
    mesh = Mesh(dp=size.dp, tp=size.tp)
    comm = SimulatedComm(mesh)

    def layout(name: str, ndim: int) -> Layout:
        cut = BLOCK.sharded.get(name)
        return mesh.layout(*["tp" if d == cut else None for d in range(ndim)])

    cut = {n: distribute(p, layout(n, p.ndim), comm) for n, p in params.items()}
    rows = distribute(x, mesh.layout("dp"), comm)
    step = spmd(gradients)
    first = _least(lambda: step(cut, rows), 1)
    alone = _least(lambda: gradients(params, x), rounds)
    return Block(size, alone, first, _least(lambda: step(cut, rows), rounds), theirs)


def _theirs(size: Size, rounds: int) -> float:
    """What `LocalTensorMode` takes, in a process of its own, whose world is pretended."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_in_local_tensor_mode, (size, rounds))


def _in_local_tensor_mode(size: Size, rounds: int) -> float:
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    params, x = _tensors(size)
    world = size.dp * size.tp
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    with LocalTensorMode(world):
        mesh = init_device_mesh("cpu", (size.dp, size.tp), mesh_dim_names=("dp", "tp"))
        cut = {}
        for name, p in params.items():
            dim = BLOCK.sharded.get(name)
            places = [Replicate(), Replicate() if dim is None else Shard(dim)]
            cut[name] = distribute_tensor(p, mesh, places).requires_grad_()
        rows = distribute_tensor(x, mesh, [Shard(0), Replicate()])

        def step() -> list[torch.Tensor]:
            grads = torch.autograd.grad(BLOCK.loss(cut, rows), list(cut.values()))
            pairs = zip(grads, cut.values(), strict=True)
            return [grad.redistribute(mesh, p.placements) for grad, p in pairs]  # type: ignore[attr-defined]

        step()
        return _least(step, rounds)


def _collectives(ranks: int, rounds: int) -> tuple[Reduced, ...]:
    mesh = Mesh(x=ranks)
    comm = SimulatedComm(mesh)
    whole = distribute(torch.ones(512, 64), mesh.layout(), comm)
    rows, terms = mesh.layout("x"), mesh.layout(partial={"x": "sum"})
    cases = {
        "reduce_scatter": (whole.redistribute(terms), rows),
        "all_reduce": (whole.redistribute(terms), mesh.layout()),
        "all_gather": (whole.redistribute(rows), mesh.layout()),
    }
    return tuple(
        Reduced(name, ranks, _least(lambda x=x, to=to: x.redistribute(to), rounds + 1))
        for name, (x, to) in cases.items()
    )


def show(console: Console, found: Found) -> None:
    """The cases as tables."""
    blocks = Table(title="gradients of a block, seconds of CPU, least", title_justify="left")
    headings = "ranks", "d", "one process", "simulated", "ratio", "first call", "LocalTensorMode"
    for heading in headings:
        blocks.add_column(heading, justify="right")
    for b in found.blocks:
        theirs = "" if b.theirs is None else f"{b.theirs:.2f}"
        times = f"{b.alone:.4f}", f"{b.simulated:.3f}", f"{b.simulated / b.alone:.1f}"
        ranks, width = f"{b.size.dp} x {b.size.tp}", str(b.size.times * BLOCK.x[-1])
        blocks.add_row(ranks, width, *times, f"{b.first:.1f}", theirs)
    console.print(blocks)
    collectives = Table(title="f32[512,64], seconds of CPU, least", title_justify="left")
    for heading in ("collective", "ranks", "seconds"):
        collectives.add_column(heading, justify="left" if heading == "collective" else "right")
    for r in found.collectives:
        collectives.add_row(r.name, str(r.ranks), f"{r.seconds:.3f}")
    console.print(collectives)
