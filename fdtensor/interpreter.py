"""`run`: reads a plan on a Comm, step by step. Differentiable, twice, and by `torch.func`."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
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

__all__ = ["admit", "digest_of", "run", "run_fused", "spread", "tracked"]


def run(found: Plan, value: Value, comm: Comm[Value], *, check: Check | None = None) -> Value:
    """`value`, a tensor of type `found.src`, as one of type `found.dst`.

    On a real mesh this is collective over the ranks of both meshes; a rank in neither gets its
    input back, one that leaves gets an empty tensor. The result never shares memory with `value`.
    Raises `CommError` on all ranks, before anything is sent, where one has another plan or a tensor
    that does not fit.

    Derivatives are those of the full tensor: the backward runs `found.transpose()`, and replicas
    have one cotangent, that of the tensor. It is as collective as the forward is, so autograd
    tracks the values of all ranks or of none. A rank that is not in the source takes part with an
    empty tensor, which requires grad where the values of the others do.
    """
    admit(found, comm, [found.src], [value], check)
    if tracked([value]):
        return _differentiable(found, [value], comm)[0]
    return execute(found, value, comm)


def run_fused(
    found: Fused, values: Sequence[Value], comm: Comm[Value], *, check: Check | None = None
) -> list[Value]:
    """Each of `values` after its plan, with one message a pair of ranks for all of them."""
    admit(found, comm, [p.src for p in found.plans], values, check)
    if tracked(values):
        return _differentiable(found, values, comm)
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
        about, digest = "this plan" if isinstance(found, Plan) else "this fused plan", found.digest
        if tracked(values):  # ranks that differ in this would wait for each other in the backward
            about, digest = f"{about} with its gradient", digest_of(f"{digest} with its gradient")
        meshes = dict.fromkeys(mesh for p in _plans(found) for mesh in (p.src.mesh, p.dst.mesh))
        comm.agree(about, digest, list(meshes), wrong[0] if wrong else None)
        seen.add(found)
        return
    for value, type in zip(values, types, strict=True):
        mistake = comm.mistake(value, type)
        if mistake:
            comm.refuse("this plan", mistake)


def digest_of(text: str) -> str:
    """A hexadecimal fingerprint of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plans(found: Plan | Fused) -> tuple[Plan, ...]:
    return (found,) if isinstance(found, Plan) else found.plans


def execute(found: Plan, value: Value, comm: Comm[Value]) -> Value:
    """`value` after every step, without checks and without autograd."""
    if not found.steps:
        return value if _absent(found, comm) else comm.copy(value)
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

Leaves = Sequence[Any]
"""The tensors of some values, one value after the other; in a derivative None stands for zeros."""


def tracked(values: Sequence[object]) -> bool:
    """Whether a derivative of what is computed from these values may be asked for."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if not transformed and not torch.is_grad_enabled():
        return False
    for value in values:
        for leaf in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(leaf, torch.Tensor) and (transformed or leaf.requires_grad):
                return True
    return False


def spread(tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """The tensor as `count` replicas, whose one cotangent is that of the tensor."""
    if count == 1 or not tracked([tensor]):
        return (tensor,) * count
    return _Spread.apply(tensor, count)  # type: ignore[return-value]


class _Run(torch.autograd.Function):
    """Plans as a linear map of the full tensors: their transpose is the backward."""

    @staticmethod
    def forward(found: Plan | Fused, comm: Any, *leaves: torch.Tensor) -> tuple[Any, ...]:
        values = _values(_sources(found), leaves, comm)
        return _leaves(_executed(found, values, comm), comm)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.found, ctx.comm, *leaves = inputs
        ctx.shapes = [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        # all ranks here: a replica that is not used has no cotangent of its own
        if any(ctx.comm.width(type) > 1 for type in _targets(ctx.found)):
            ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        back, comm = ctx.found.transpose(), ctx.comm
        values = _values(_sources(back), _replicated(_sources(back), grads, comm), comm)
        if isinstance(back, Plan):
            out = comm.leaves(run(back, values[0], comm))
        else:
            out = _leaves(run_fused(back, values, comm), comm)
        return None, None, *map(_shaped, out, ctx.shapes)

    @staticmethod
    def jvp(ctx: Any, _found: None, _comm: None, *tangents: Any) -> Any:  # type: ignore[override]
        found, comm = ctx.found, ctx.comm
        found.transpose()  # refuses what is not linear
        tangents = _materialized(_sources(found), tangents, comm)
        values = _values(_sources(found), tangents, comm)
        if isinstance(found, Plan):
            return tuple(comm.leaves(run(found, values[0], comm)))
        return _leaves(run_fused(found, values, comm), comm)

    @staticmethod
    def vmap(info: Any, in_dims: Any, found: Plan | Fused, comm: Any, *leaves: Any) -> Any:  # type: ignore[override]
        size = info.batch_size
        stacked = [_stacked(leaf, d, size) for leaf, d in zip(leaves, in_dims[2:], strict=True)]
        values = _values(_sources(found), stacked, comm)
        if isinstance(found, Plan):
            out = tuple(comm.leaves(run(batched(found, size), values[0], comm)))
        else:
            wide = fuse([batched(p, size) for p in found.plans])
            out = _leaves(run_fused(wide, values, comm), comm)
        return out, tuple([0 if isinstance(leaf, torch.Tensor) else None for leaf in out])


class _Spread(torch.autograd.Function):
    """One tensor as equal replicas: all have the same cotangent, so one of them is taken."""

    @staticmethod
    def forward(tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        return tuple([tensor.view_as(tensor) for _ in range(count)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.count = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        return next(grad for grad in grads if grad is not None), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _count: None) -> Any:  # type: ignore[override]
        return spread(tangent, ctx.count)

    @staticmethod
    def vmap(info: Any, in_dims: Any, tensor: torch.Tensor, count: int) -> Any:  # type: ignore[override]
        return spread(tensor, count), (in_dims[0],) * count


def _differentiable(found: Plan | Fused, values: Sequence[Any], comm: Any) -> list[Any]:
    if _absent(found, comm):
        return list(values)
    out: Any = _Run.apply(found, comm, *_leaves(values, comm))
    return _values(_targets(found), out, comm)


def _executed(found: Plan | Fused, values: Sequence[Any], comm: Any) -> list[Any]:
    if isinstance(found, Plan):
        return [execute(found, values[0], comm)]
    return execute_fused(found, values, comm)


def _sources(found: Plan | Fused) -> list[TensorType]:
    return [p.src for p in _plans(found)]


def _targets(found: Plan | Fused) -> list[TensorType]:
    return [p.dst for p in _plans(found)]


def _leaves(values: Sequence[Any], comm: Any) -> tuple[Any, ...]:
    return tuple([leaf for value in values for leaf in comm.leaves(value)])


def _values(types: Sequence[TensorType], leaves: Leaves, comm: Any) -> list[Any]:
    """The leaves as one value for each type."""
    return [comm.value(part) for _, part in _parts(types, leaves, comm)]


def _parts(types: Sequence[TensorType], leaves: Leaves, comm: Any) -> Iterator[tuple[Any, Leaves]]:
    start = 0
    for type in types:
        stop = start + comm.width(type)
        yield type, leaves[start:stop]
        start = stop


def _replicated(types: Sequence[TensorType], grads: Leaves, comm: Any) -> Leaves:
    """The cotangents, where a replica that was not used has that of one that was."""
    if all(grad is not None for grad in grads):
        return grads
    out: list[Any] = []
    for type, part in _parts(types, grads, comm):
        places: dict[Any, list[int]] = {}
        for i, rank in enumerate(type.mesh.order):
            places.setdefault(type.box(type.mesh.coord(rank) or ()), []).append(i)
        filled = list(part)
        for same in places.values():
            missing = [i for i in same if part[i] is None]
            known = next((i for i in same if part[i] is not None), None)
            if missing and known is not None:
                copies = spread(part[known], len(missing) + 1)
                for i, copy in zip([known, *missing], copies, strict=True):
                    filled[i] = copy
        out += filled
    return _materialized(types, out, comm)


def _materialized(types: Sequence[TensorType], leaves: Leaves, comm: Any) -> Leaves:
    """The leaves, with zeros for None."""
    if all(leaf is not None for leaf in leaves):
        return leaves
    device = next(leaf.device for leaf in leaves if leaf is not None)
    out: list[Any] = []
    for type, part in _parts(types, leaves, comm):
        for leaf, rank in zip(part, type.mesh.order):
            shape = type.local_shape(rank) if leaf is None else ()
            zeros = torch.zeros(shape, dtype=type.dtype, device=device)
            out.append(zeros if leaf is None else leaf)
    return out


def _shaped(grad: Any, shape: torch.Size | None) -> Any:
    """The cotangent of an input: of a rank that is not in the source, zeros of any shape."""
    if shape is None or grad.shape == shape:
        return None if shape is None else grad
    return grad.new_zeros(shape)


def _absent(found: Plan | Fused, comm: Any) -> bool:
    """Whether this is a rank that is in none of the meshes."""
    rank = getattr(comm, "rank", None)
    return rank is not None and all(
        type.mesh.position(rank) is None for type in (*_sources(found), *_targets(found))
    )


def _stacked(leaf: Any, dim: int | None, size: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.expand(size, *leaf.shape) if dim is None else leaf.movedim(dim, 0)


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
