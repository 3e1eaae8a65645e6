"""The command `train`: the GPT on a mesh, with the program's summary and a line of loss."""

from __future__ import annotations

import argparse
import collections
import os
import platform
import time
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fdtensor.layouts.errors import FdtensorError, MeshError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.progress import busy
from fdtensor.parallel.pipelines.planned import Planned
from fdtensor.plans.cost import GLOO, NCCL
from fdtensor.programs.program import Program
from fdtensor.train.gpt import Size
from fdtensor.train.job import Job
from fdtensor.train.loop import steps
from fdtensor.train.model import Model
from fdtensor.train.optimizer import AdamW
from fdtensor.train.pipelined import parts_of_batch
from fdtensor.train.pretrained import Pretrained
from fdtensor.train.saves import Saves

__all__ = ["add_arguments", "train"]

ABOUT = """\
Trains a GPT of a million parameters, or the causal model in a Hugging Face folder, on the sources
of Python's standard library. An axis does what its name says: dp (data parallel), fsdp (ZeRO-3), tp
(tensor parallel), sp (tp with the sequence sharded between attention and MLP), pp (a pipeline: each
rank has a run of layers)."""

_WEEK = 7 * 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the command takes."""
    size, job = Size(), Job()
    parser.description = ABOUT
    add = parser.add_argument
    add(
        "--mesh",
        metavar="MESH",
        default="dp=2,tp=2",
        help="axes and sizes, one of which may be * for as many ranks as there are (dp=2,tp=2)",
    )
    add("--simulate", action="store_true", help="all ranks in this process")
    add("--steps", type=int, default=job.steps, help=f"(default {job.steps})")
    add("--model", metavar="FOLDER", help="a causal model as save_pretrained writes it")
    add("--save", metavar="FOLDER", help="write the trained model there, for from_pretrained")
    add("--bf16", action="store_true", help="compute in bf16; parameters and optimizer in f32")
    add("--cosine", action="store_true", help="the rate falls to a tenth by the last step")
    add("--batch", type=int, default=job.batch, help=f"excerpts a step (default {job.batch})")
    add("--length", type=int, default=size.length, help=f"of each excerpt (default {size.length})")
    add("--layers", type=int, default=size.layers, help=f"(default {size.layers})")
    add("--width", type=int, default=size.width, help=f"(default {size.width})")
    add("--heads", type=int, default=size.heads, help=f"(default {size.heads})")
    add("--dropout", type=float, default=0.0, metavar="P", help="in training (default 0)")
    add("--lr", type=float, default=AdamW().lr, help=f"learning rate (default {AdamW().lr:g})")
    add("--seed", type=int, default=job.seed, help=f"of weights and text (default {job.seed})")
    add("--every", type=int, default=20, metavar="N", help="a line each N steps (default 20)")
    add("--checkpoint", metavar="FOLDER", help="save there, and go on from what is there")
    add("--save-every", type=int, default=20, metavar="N", help="steps (default 20)")
    add("--keep", type=int, default=2, metavar="N", help="checkpoints (default 2)")
    add("--microbatches", type=int, metavar="N", help="parts of a batch in a pipeline")
    schedules = ("gpipe", "1f1b", "zero_bubble")
    add("--schedule", choices=schedules, help="of a pipeline (default 1f1b)")
    add("--regather", action="store_true", help="gather parameters again in the backward")
    add("--program", action="store_true", help="print all of the program, not its summary only")


def train(mesh: Mesh, options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status.

    On the simulated mesh, on the ranks of torchrun, or else on gloo processes of its own.
    """
    job = _job(options)
    job.layouts(mesh)  # refuses what cannot be before any process starts
    if "pp" in mesh.axes:
        parts_of_batch(job, mesh, options.microbatches)
    elif options.microbatches is not None or options.schedule is not None:
        raise FdtensorError("there is no pipeline.", mesh=mesh, hint="Give the mesh an axis pp.")
    how = {name: getattr(options, name) for name in ("regather", "microbatches")}
    how["schedule"] = options.schedule or "1f1b"
    show = _Show(max(1, options.every), options.program, how, options.save)
    if options.checkpoint:
        show = attrs.evolve(show, saves=Saves(options.checkpoint, options.save_every, options.keep))
    if options.simulate:
        from fdtensor.runtime.simulator import SimulatedComm

        show.run(job, SimulatedComm(mesh))
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _under_torchrun(job, mesh, show)
    else:
        _on_processes(job, mesh, show)
    return 0


def _job(options: argparse.Namespace) -> Job:
    if options.model is None and options.save is not None:
        raise FdtensorError("only a model of a folder is saved.", hint="Give --model FOLDER.")
    if options.save is not None and any(Path(options.save).glob("*.safetensors")):
        raise FdtensorError(f"{options.save!r} has a model already.", hint="Give another folder.")
    if not 0 < options.lr < float("inf"):
        raise FdtensorError(
            f"{options.lr} is no learning rate.", hint="Give one above 0: --lr 1e-3."
        )
    model: Model = (
        Size(options.layers, options.width, options.heads, options.length, options.dropout)
        if options.model is None
        else Pretrained(options.model, options.length)
    )
    numbers = AdamW(lr=options.lr, until=options.steps if options.cosine else None)
    precision = torch.bfloat16 if options.bf16 else None
    return Job(model, numbers, options.steps, options.batch, options.seed, precision=precision)


@attrs.frozen
class _Show:
    """The run and its print: `every` steps a line, and the program in full or in short."""

    every: int
    in_full: bool
    how: Mapping[str, Any]
    """What `steps` takes besides."""
    folder: str | None = None
    """Where the trained model is written."""
    saves: Saves | None = None

    def steps(self, job: Job, comm: Any, **show: Any) -> Iterator[tuple[int, float]]:
        """Those of the job, run as it is to be."""

        def end(params: Any) -> None:
            if self.folder is not None and isinstance(job.model, Pretrained):
                job.model.save(params, self.folder, comm)

        return steps(job, comm, **self.how, saves=self.saves, end=end, **show)

    def run(self, job: Job, comm: Any) -> None:
        """Trains and prints."""
        console = Console(highlight=False, soft_wrap=True)
        console.print(_title(job, comm.mesh), markup=False)

        def show(program: Program | Planned) -> None:
            short = program.summary() if isinstance(program, Program) else str(program)
            console.print(str(program) if self.in_full else short, markup=False)
            console.print("losses:")

        start = time.perf_counter()
        columns = TextColumn("loss {task.fields[loss]:.3f}"), BarColumn(), MofNCompleteColumn()
        bar = Progress(
            *columns,
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        done, loss = 0, float("nan")
        with busy(), bar:
            task = bar.add_task("", total=job.steps, loss=loss)
            for i, loss in self.steps(job, comm, show=show):
                if not done and i:
                    console.print(f"goes on at step {i}, from {self.saves and self.saves.folder}")
                done += 1
                bar.update(task, completed=i + 1, loss=loss)
                if i % self.every == 0 or i == job.steps - 1:
                    console.print(f"  step {i:>5}  {loss:.4f}")
        seconds = time.perf_counter() - start
        if done:
            console.print(f"{done} steps in {seconds:.1f} s, loss {loss:.4f}")
        else:
            console.print(f"no step is left of {job.steps}: the checkpoint is at or past it")


def _title(job: Job, mesh: Mesh) -> str:
    count = sum(map(prod, job.shapes.values()))
    text = f"{len(job.model.text()):,} tokens of Python {platform.python_version()}'s library"
    return f"{job.model.title} of {count:,} parameters, {text}, on {mesh!r}"


def _under_torchrun(job: Job, mesh: Mesh, show: _Show) -> None:
    import torch.distributed as dist

    from fdtensor.runtime.process_groups import up

    up()
    try:
        if dist.get_world_size() != mesh.size:
            raise MeshError(
                f"the mesh has {mesh.size} ranks, but torchrun started {dist.get_world_size()}.",
                mesh=mesh,
                hint=f"Write torchrun --nproc-per-node {mesh.size}, or give another --mesh.",
            )
        _on_this_rank(job, mesh, show)
    finally:
        dist.destroy_process_group()


def _on_this_rank(job: Job, mesh: Mesh, show: _Show) -> None:
    """Trains on one rank of a real mesh; the process group is up. Only rank 0 prints."""
    import torch.distributed as dist

    from fdtensor.runtime.funcol import FuncolComm
    from fdtensor.runtime.process_groups import default_device

    device = default_device()
    comm = FuncolComm(mesh, device, cost=GLOO if device == "cpu" else NCCL)
    if dist.get_rank() == 0:
        show.run(job, comm)
    else:
        collections.deque(show.steps(job, comm), maxlen=0)


def _on_processes(job: Job, mesh: Mesh, show: _Show) -> None:
    """Trains on gloo processes that are started for it, one a rank."""
    from fdtensor.testing.pool import GlooPool, WorkerError

    with GlooPool(mesh.size, timeout=_WEEK) as pool:
        try:
            pool.run(_on_this_rank, job, mesh, show)
        except WorkerError as error:
            raise FdtensorError(f"training failed: {error}") from error
