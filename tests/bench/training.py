"""`python -m tests.bench train`: a Llama of Hugging Face trained beside torch's own ways.

The same model, text, optimizer and clipping on 4 gloo processes: data parallel beside
`DistributedDataParallel`, sharded state beside `fully_shard`, Megatron beside DTensor's styles, and
both together. Steps run in turns; their losses are compared, and the most bytes that each holds.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import accumulate
from statistics import median
from typing import Any

import attrs
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.profiler import ProfilerActivity

from fdtensor.layouts.mesh import Mesh
from fdtensor.plans.cost import GLOO
from fdtensor.runtime.funcol import FuncolComm
from fdtensor.testing.pool import GlooPool
from fdtensor.train import AdamW, Job, Pretrained, plain_losses
from fdtensor.train.loop import steps

__all__ = ["FULL", "MESHES", "QUICK", "Effort", "Found", "Trained", "measure", "show"]

MESHES = Mesh(dp=4), Mesh(fsdp=4), Mesh(tp=4), Mesh(fsdp=2, tp=2)


@attrs.frozen
class Effort:
    """How much a run measures."""

    width: int
    layers: int
    length: int
    batch: int
    calls: int
    """Steps, of which the first two are not timed."""
    meshes: tuple[Mesh, ...] = MESHES


FULL = Effort(width=256, layers=4, length=128, batch=16, calls=20)
QUICK = Effort(width=128, layers=2, length=64, batch=8, calls=6, meshes=MESHES[:3])


@attrs.frozen
class Trained:
    """The training of one model on one mesh: tokens a second, and how far losses are apart."""

    mesh: str
    own: float
    torchs: float
    first: float
    """The seconds of the first step, with tracing."""
    apart: float
    """Between the losses and those of one process, at most."""
    torchs_apart: float
    peak: int
    """The most bytes that tensors of rank 0 hold, as the allocator counts them."""
    torchs_peak: int


@attrs.frozen
class Found:
    """What a run measured."""

    trained: tuple[Trained, ...]


def measure(pool: GlooPool, effort: Effort, tick: Callable[..., None] = lambda *_: None) -> Found:
    """The training on all meshes: `pool` has 4 ranks."""
    with tempfile.TemporaryDirectory() as folder:
        _write(folder, effort)
        wanted = list(plain_losses(_job(folder, effort)))
        trained: list[Trained] = []
        for mesh in effort.meshes:
            tick(str(mesh), 0)
            times = pool.run(_timed, folder, mesh, effort, wanted, timeout=1200)[0]
            trained.append(
                Trained(*times, *pool.run(_peaks, folder, mesh, effort, timeout=1200)[0])
            )
            tick(str(mesh), 1)
    return Found(tuple(trained))


def _write(folder: str, effort: Effort) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=effort.width,
        intermediate_size=effort.width * 8 // 3 // 8 * 8,
        num_hidden_layers=effort.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=effort.length,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _job(folder: str, effort: Effort) -> Job:
    model = Pretrained(folder, effort.length)
    return Job(model, AdamW(warmup=4), effort.calls, effort.batch)


def _timed(folder: str, mesh: Mesh, effort: Effort, wanted: list[float]) -> tuple[Any, ...]:
    """Steps of both on this rank, in turns: the fields of `Trained` up to the peaks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    job = _job(folder, effort)
    start = time.perf_counter()
    ours = (loss for _, loss in steps(job, FuncolComm(mesh, cost=GLOO)))
    losses: list[list[float]] = [[next(ours)], []]
    first = time.perf_counter() - start
    other = _torchs(folder, mesh, job)
    losses[1].append(next(other))
    spent: list[list[float]] = [[], []]
    for _ in range(1, effort.calls):
        for i, one in enumerate((ours, other)):
            dist.barrier()
            start = time.perf_counter()
            losses[i].append(next(one))
            dist.barrier()
            spent[i].append(time.perf_counter() - start)
    rates = [effort.batch * effort.length / median(times[1:]) for times in spent]
    apart = [max(abs(a - b) for a, b in zip(found, wanted, strict=True)) for found in losses]
    return repr(mesh), *rates, first, *apart


PEAK_STEPS = 3
"""The steps in which the most bytes are looked for; moments are there from the first one on."""


def _peaks(folder: str, mesh: Mesh, effort: Effort) -> tuple[int, int]:
    """The most bytes of both on this rank, one after the other."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    job = _job(folder, effort)
    return (
        _most_allocated(lambda: steps(job, FuncolComm(mesh, cost=GLOO))),
        _most_allocated(lambda: _torchs(folder, mesh, job)),
    )


def _most_allocated(start: Callable[[], Iterator[Any]]) -> int:
    """The most bytes that are allocated at once from the start of a training on.

    By the records of the allocator, which has those of C++ too, such as buckets of gradients; the
    size of a process depends on what malloc gives back.
    """
    os.environ["KINETO_LOG_LEVEL"] = "99"  # it tells of each start and stop
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in zip(range(PEAK_STEPS), start(), strict=False):
            pass
    assert profile.profiler is not None
    records = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    records.sort(key=lambda e: e.start_ns())
    return max(accumulate(e.nbytes() for e in records))


# --- torch's ways --------------------------------------------------------------------------------


def _torchs(folder: str, mesh: Mesh, job: Job) -> Any:
    """The loss before each step, by torch's own parallelism."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    devices = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.axes)
    if "tp" in mesh.axes:
        _megatron(model, devices["tp"])
    if "fsdp" in mesh.axes:
        for layer in model.model.layers:
            fully_shard(layer, mesh=devices["fsdp"])
        fully_shard(model, mesh=devices["fsdp"])
    if "dp" in mesh.axes:
        model = torch.nn.parallel.DistributedDataParallel(model)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    numbers = job.numbers
    groups = [
        {"params": matrices, "weight_decay": numbers.decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, numbers.lr, numbers.betas, numbers.eps, foreach=True)
    cutting = [a for a in mesh.axes if a != "tp"]
    ranks, index = (
        (devices[cutting[0]].size(), devices[cutting[0]].get_local_rank()) if cutting else (1, 0)
    )
    for i, tokens in enumerate(job.text()):
        for group in optimizer.param_groups:
            group["lr"] = numbers.rate(i)
        part = tokens.chunk(ranks)[index]
        logits = model(input_ids=part[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
        loss.backward()
        _clip([p.grad for p in model.parameters() if p.grad is not None], numbers.clip)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if cutting:
            dist.all_reduce(mean, group=devices[cutting[0]].get_group())
        yield mean.item() / ranks


def _megatron(model: Any, devices: DeviceMesh) -> None:
    columns, rows = ColwiseParallel, RowwiseParallel
    plan = {
        "model.embed_tokens": rows(input_layouts=Replicate()),
        "model.layers.*.self_attn.[qkv]_proj": columns(),
        "model.layers.*.self_attn.o_proj": rows(),
        "model.layers.*.mlp.gate_proj": columns(),
        "model.layers.*.mlp.up_proj": columns(),
        "model.layers.*.mlp.down_proj": rows(),
        "lm_head": columns(output_layouts=Replicate()),
    }
    parallelize_module(model, devices, plan)


def _clip(grads: list[torch.Tensor], limit: float) -> None:
    """Clips by the global norm, with one reduction of a number for each way of being cut."""
    total = torch.zeros(())
    groups: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        if isinstance(grad, DTensor):
            cutting = tuple(
                name
                for name, p in zip(
                    grad.device_mesh.mesh_dim_names or (), grad.placements, strict=True
                )
                if not p.is_replicate()  # a strided shard says no to is_shard()
            )
            groups.setdefault((grad.device_mesh, cutting), []).append(grad.to_local())
        else:
            groups.setdefault(None, []).append(grad)
    for cut, locals in groups.items():
        squares = torch.stack(torch._foreach_norm(locals)).square().sum()
        if cut is not None:
            for name in cut[1]:
                dist.all_reduce(squares, group=cut[0][name].get_group())
        total = total + squares
    scale = (limit / (total.sqrt() + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in grads], scale)


# --- what is shown -------------------------------------------------------------------------------


def show(console: Console, found: Found) -> None:
    """Prints a table."""
    table = Table(title="a Llama, tokens a second on 4 gloo processes")
    for column in (
        "mesh",
        "torch",
        "fdtensor",
        "ratio",
        "first step",
        "peak",
        "torch's",
        "apart",
        "torch's",
    ):
        table.add_column(column, justify="left" if column == "mesh" else "right")
    for row in found.trained:
        table.add_row(
            row.mesh,
            f"{row.torchs:,.0f}",
            f"{row.own:,.0f}",
            f"{row.own / row.torchs:.2f}",
            f"{row.first:.1f} s",
            f"{row.peak / 2**20:.0f} MiB",
            f"{row.torchs_peak / 2**20:.0f} MiB",
            f"{row.apart:.1e}",
            f"{row.torchs_apart:.1e}",
        )
    console.print(table)
