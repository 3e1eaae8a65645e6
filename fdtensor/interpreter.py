"""`run`: reads a plan on a Comm, step by step. Differentiable, twice, and by `torch.func`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

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
from fdtensor.derivative import differentiable, plans_of, tracked
from fdtensor.fused import Fused
from fdtensor.layout import TensorType
from fdtensor.planner import Plan

__all__ = ["admit", "digest_of", "run", "run_fused"]


def run(found: Plan, value: Value, comm: Comm[Value], *, check: Check | None = None) -> Value:
    """`value`, a tensor of type `found.src`, as one of type `found.dst`.

    On a real mesh this is collective over the ranks of both meshes; a rank in neither gets its
    input back, one that leaves gets an empty tensor. The result never shares memory with `value`.
    Raises `CommError` on all ranks, before anything is sent, where one has another plan or a tensor
    that does not fit.

    Derivatives are those of the full tensor, and the backward runs `found.transpose()`. That is
    collective too: autograd tracks the values of all ranks or of none. A rank outside of the source
    takes part with an empty tensor, which requires grad where the values of the others do.
    """
    admit(found, comm, [found.src], [value], check)
    if tracked([value]) and not _absent(found, comm):
        return differentiable(found, [value], comm, _go)[0]
    return execute(found, value, comm)


def run_fused(
    found: Fused, values: Sequence[Value], comm: Comm[Value], *, check: Check | None = None
) -> list[Value]:
    """Each of `values` after its plan, with one message a pair of ranks for all of them."""
    admit(found, comm, [p.src for p in found.plans], values, check)
    if tracked(values) and not _absent(found, comm):
        return differentiable(found, values, comm, _go)
    return execute_fused(found, values, comm)


def _go(found: Plan | Fused, values: Sequence[Any], comm: Any, admitted: bool) -> list[Any]:
    if isinstance(found, Plan):
        value = values[0]
        return [execute(found, value, comm) if admitted else run(found, value, comm)]
    return execute_fused(found, values, comm) if admitted else run_fused(found, values, comm)


def _absent(found: Plan | Fused, comm: Any) -> bool:
    """Whether this is a rank that is in none of the meshes."""
    rank = getattr(comm, "rank", None)
    return rank is not None and all(
        mesh.position(rank) is None for p in plans_of(found) for mesh in (p.src.mesh, p.dst.mesh)
    )


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
        meshes = dict.fromkeys(m for p in plans_of(found) for m in (p.src.mesh, p.dst.mesh))
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
