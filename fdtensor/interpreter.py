"""`run`: reads a plan on a Comm, step by step. Differentiable, twice, and by `torch.func`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import assert_never

from fdtensor.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Mask,
    Pad,
    ReduceScatter,
    Scale,
    Slice,
)
from fdtensor.comm import Check, Comm, Value
from fdtensor.fused import Fused, fuse
from fdtensor.layout import Layout, TensorType
from fdtensor.placement import Ragged, Shard, StridedShard
from fdtensor.planner import Plan, plan

__all__ = ["admit", "run", "run_fused"]


def run(found: Plan, value: Value, comm: Comm[Value], *, check: Check | None = None) -> Value:
    """`value`, a tensor of type `found.src`, as one of type `found.dst`.

    On a real mesh this is collective over the ranks of both meshes; a rank in neither gets its
    input back, one that leaves gets an empty tensor. The result never shares memory with `value`.
    Raises `CommError` on all ranks, before anything is sent, where one has another plan or a tensor
    that does not fit.
    """
    admit(found, comm, [found.src], [value], check)
    leaves = comm.leaves(value)
    if _tracked(leaves):
        return comm.value(_Run.apply(found, comm, *leaves))  # type: ignore[arg-type]
    return execute(found, value, comm)


def run_fused(
    found: Fused, values: Sequence[Value], comm: Comm[Value], *, check: Check | None = None
) -> list[Value]:
    """Each of `values` after its plan, with one message a pair of ranks for all of them."""
    admit(found, comm, [p.src for p in found.plans], values, check)
    leaves = [comm.leaves(value) for value in values]
    flat = [leaf for some in leaves for leaf in some]
    if _tracked(flat):
        out = _RunFused.apply(found, comm, tuple(map(len, leaves)), *flat)
        return _grouped(found, out, comm)  # type: ignore[arg-type]
    return execute_fused(found, values, comm)


def admit(
    found: Plan | Fused,
    comm: Comm[Value],
    types: Sequence[TensorType],
    values: Sequence[Value],
    check: Check | None = None,
) -> None:
    """Agrees with the other ranks on the first use of a plan; later looks at the values only."""
    seen: set[object] = comm.__dict__.setdefault("_agreed", set())
    check = check or comm.check
    if check == "always" or (check == "first" and found not in seen):
        wrong = [m for m in map(comm.mistake, values, types) if m]
        about = "this plan" if isinstance(found, Plan) else "this fused plan"
        meshes = dict.fromkeys(mesh for p in _plans(found) for mesh in (p.src.mesh, p.dst.mesh))
        comm.agree(about, found.digest, list(meshes), wrong[0] if wrong else None)
        seen.add(found)
        return
    for value, type in zip(values, types, strict=True):
        mistake = comm.mistake(value, type)
        if mistake:
            comm.refuse("this plan", mistake)


def _plans(found: Plan | Fused) -> tuple[Plan, ...]:
    return (found,) if isinstance(found, Plan) else found.plans


def execute(found: Plan, value: Value, comm: Comm[Value]) -> Value:
    """`value` after every step, without checks and without autograd."""
    if not found.steps:
        return comm.copy(value)
    owned = False
    for step in found.steps:
        match step.collective:
            case Slice() | Mask() | Pad() | Scale():
                value = comm.local(step, value)
            case Exchange():
                value = comm.exchange(step, value)
            case AllGather():
                value = comm.all_gather(step, value)
            case AllToAll():
                value = comm.all_to_all(step, value)
            case AllReduce():
                value = comm.all_reduce(step, value, owned)
            case ReduceScatter():
                value = comm.reduce_scatter(step, value)
            case Broadcast():
                value = comm.broadcast(step, value)
            case other:
                assert_never(other)
        owned = True
    return value


def execute_fused(found: Fused, values: Sequence[Value], comm: Comm[Value]) -> list[Value]:
    """The values after their plans, whose exchanges meet in rounds."""
    done = [comm.copy(v) if not p.steps else v for p, v in zip(found.plans, values, strict=True)]
    todo = [list(p.steps) for p in found.plans]
    while any(todo):
        meeting = []
        for i, steps in enumerate(todo):
            while steps and not isinstance(steps[0].collective, Exchange):
                done[i] = comm.local(steps.pop(0), done[i])
            if steps:
                meeting.append(i)
        if meeting:
            steps = [todo[i].pop(0) for i in meeting]
            for i, value in zip(meeting, comm.exchange_many(steps, [done[i] for i in meeting])):
                done[i] = value
    return done


# --- derivatives -----------------------------------------------------------------------------


def _tracked(leaves: Sequence[torch.Tensor]) -> bool:
    if torch._C._are_functorch_transforms_active():
        return any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return torch.is_grad_enabled() and any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves
    )


class _Run(torch.autograd.Function):
    """A plan as a linear map of the full tensor: its transpose is the backward."""

    @staticmethod
    def forward(found: Plan, comm: Any, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(comm.leaves(execute(found, comm.value(leaves), comm)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.found, ctx.comm = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        comm = ctx.comm
        back = run(ctx.found.transpose(), comm.value(grads), comm)
        return (None, None, *comm.leaves(back))

    @staticmethod
    def jvp(ctx: Any, _found: None, _comm: None, *tangents: torch.Tensor) -> Any:  # type: ignore[override]
        comm = ctx.comm
        ctx.found.transpose()  # refuses what is not linear
        return tuple(comm.leaves(run(ctx.found, comm.value(tangents), comm)))

    @staticmethod
    def vmap(info: Any, in_dims: Any, found: Plan, comm: Any, *leaves: torch.Tensor) -> Any:  # type: ignore[override]
        stacked = _stacked(leaves, in_dims[2:], info.batch_size)
        wide = batched(found, info.batch_size)
        out = tuple(comm.leaves(run(wide, comm.value(stacked), comm)))
        return out, (0,) * len(out)


class _RunFused(torch.autograd.Function):
    """Several plans at once, as a linear map."""

    @staticmethod
    def forward(
        found: Fused, comm: Any, counts: tuple[int, ...], *leaves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        values = _split(leaves, counts)
        out = execute_fused(found, [comm.value(v) for v in values], comm)
        return tuple(leaf for value in out for leaf in comm.leaves(value))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.found, ctx.comm = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        back = run_fused(ctx.found.transpose(), _grouped(ctx.found, grads, ctx.comm), ctx.comm)
        return (None, None, None, *(leaf for value in back for leaf in ctx.comm.leaves(value)))

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any, in_dims: Any, found: Fused, comm: Any, counts: Any, *leaves: torch.Tensor
    ) -> Any:
        stacked = _stacked(leaves, in_dims[3:], info.batch_size)
        values = [comm.value(v) for v in _split(stacked, counts)]
        wide = fuse([batched(p, info.batch_size) for p in found.plans])
        out = [leaf for v in run_fused(wide, values, comm) for leaf in comm.leaves(v)]
        return tuple(out), (0,) * len(out)


def _split(leaves: Sequence[torch.Tensor], counts: Sequence[int]) -> list[Sequence[torch.Tensor]]:
    parts, start = [], 0
    for count in counts:
        parts.append(leaves[start : start + count])
        start += count
    return parts


def _grouped(found: Fused, leaves: Sequence[torch.Tensor], comm: Any) -> list[Any]:
    """The leaves of all results, as one value for each plan."""
    counts = [comm.width(p.dst) for p in found.plans]
    return [comm.value(part) for part in _split(leaves, counts)]


def _stacked(leaves: Sequence[torch.Tensor], dims: Sequence[int | None], size: int) -> list[Any]:
    return [
        leaf.expand(size, *leaf.shape) if d is None else leaf.movedim(d, 0)
        for leaf, d in zip(leaves, dims, strict=True)
    ]


@functools.lru_cache(maxsize=4096)
def batched(found: Plan, size: int) -> Plan:
    """The same plan for `size` tensors stacked along a new first dim."""
    return plan(_batched(found.src, size), _batched(found.dst, size), cost=found.cost)


def _batched(type: TensorType, size: int) -> TensorType:
    placements = []
    for placement in type.layout.placements:
        match placement:
            case Shard(dim):
                placement = Shard(dim + 1)
            case StridedShard(dim, factor):
                placement = StridedShard(dim + 1, factor)
            case Ragged(dim, sizes):
                placement = Ragged(dim + 1, sizes)
            case _:
                pass
        placements.append(placement)
    order = {dim + 1: axes for dim, axes in type.layout.order}
    layout = Layout(type.mesh, placements, order)
    return TensorType((size, *type.shape), type.dtype, layout)
