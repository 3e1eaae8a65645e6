"""`run`: reads a plan on a Comm, step by step. Differentiable, twice, and by `torch.func`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import attrs

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.words import shown
from fdtensor.plans.collectives import Exchange
from fdtensor.plans.fused import Fused
from fdtensor.plans.planner import Plan
from fdtensor.programs.options import EVERY_CALL
from fdtensor.programs.program import Program
from fdtensor.runtime.alike import compare, inputs
from fdtensor.runtime.autograd import differentiable, plans_of, tracked
from fdtensor.runtime.comm import Check, Comm, Value, inside, kind_of, refuse_no_comm
from fdtensor.runtime.digests import Digest, digest_of
from fdtensor.runtime.replication import mark, watching
from fdtensor.runtime.runner import run_locally

__all__ = ["Deed", "admit", "digest_of", "run", "run_fused"]


@overload
def run(plan: Plan, value: Value, comm: Comm[Value], *, check: Check | None = None) -> Value: ...


@overload
def run(
    plan: Program | Fused, value: Sequence[Value], comm: Comm[Value], *, check: Check | None = None
) -> list[Value]: ...


@opaque
def run(plan: Any, value: Any, comm: Any, *, check: Check | None = None) -> Any:
    """The value after a plan, or the outputs of a program for its inputs.

    After a plan it is `value`, a tensor of type `plan.src`, as one of type `plan.dst`.

    On a real mesh this is collective over the ranks of both meshes; a rank in neither gets its
    input back, one that leaves gets an empty tensor. The result never shares memory with `value`.
    Raises `CommError` on all ranks, before anything is sent, where one has another plan or a tensor
    that does not fit.

    Derivatives are those of the full tensor, and the backward runs `plan.transpose()`. That is
    collective too: autograd tracks the values of all ranks or of none. A rank outside of the source
    takes part with an empty tensor, which requires grad where the values of the others do.

    A program takes a sequence of values, in the order of its `inputs`, and gives a list. They are
    of its `in_types` and `out_types`, on its mesh, whatever meshes it was traced for. It has no
    derivative of its own: trace the gradient into it, or use `spmd`. Fused plans take a value each
    and give a list too.

    >>> mesh = Mesh(x=2)
    >>> src = TensorType((4,), torch.int64, mesh.layout("x"))
    >>> run(plan(src, mesh.layout()), shards(torch.arange(4), src.layout), SimulatedComm(mesh))
    (tensor([0, 1, 2, 3]), tensor([0, 1, 2, 3]))
    """
    match plan:
        case Program():
            return run_program(plan, value, comm, check)
        case Fused():
            return run_fused(plan, value, comm, check=check)
    try:
        types = [plan.src]
    except AttributeError:
        raise _no_plan(plan) from None
    admit(plan, comm, types, [value], check)
    if tracked([value]) and not _absent(plan, comm):
        out = differentiable(plan, [value], comm, _go)[0]
    else:
        out = comm.watched(plan, execute)(plan, value, comm)
    if watching():
        mark(comm.leaves(out), plan.dst)
    return out


def _no_plan(value: object) -> CommError:
    """The error for what no Comm runs."""
    return CommError(
        f"{shown(value)} is neither a plan nor a program.",
        hint="Write run(plan(src, dst), value, comm); call(f, x) runs a function of DTensors.",
    )


def run_fused(
    fused: Fused, values: Sequence[Value], comm: Comm[Value], *, check: Check | None = None
) -> list[Value]:
    """Each of `values` after its plan, with one message a pair of ranks for all of them."""
    admit(fused, comm, [plan.src for plan in fused.plans], values, check)
    if tracked(values) and not _absent(fused, comm):
        outs = differentiable(fused, values, comm, _go)
    else:
        outs = comm.watched(fused, execute_fused)(fused, values, comm)
    if watching():
        for out, plan in zip(outs, fused.plans, strict=True):
            mark(comm.leaves(out), plan.dst)
    return outs


def run_program(
    program: Program, values: Sequence[Any], comm: Any, check: Check | None = None
) -> list[Any]:
    """The outputs of a program for these inputs, on a Comm."""
    if not isinstance(values, (tuple, list)):
        raise CommError(
            f"{program.name} takes a list of values, not {kind_of(values)}.",
            hint="Give the local value of each input: [x.local], or write spmd(f)(x) of DTensors.",
        )
    if len(values) != len(program.inputs):
        raise CommError(
            f"{program.name} takes {len(program.inputs)} values, not {len(values)}.",
            hint="Give one value for each of program.inputs, in their order.",
        )
    if tracked(values):
        raise CommError(
            "a program has no derivative of its own, but its inputs require grad.",
            program=program.name,
            hint="Trace torch.func.grad into it, call spmd(f), or detach the inputs.",
        )
    admit(program, comm, program.in_types, values, check)
    return list(comm.watched(program, run_locally)(program, values, comm))


def _go(moves: Plan | Fused, values: Sequence[Any], comm: Any, admitted: bool) -> list[Any]:
    if isinstance(moves, Plan):
        value = values[0]
        if not admitted:
            return [run(moves, value, comm)]
        return [comm.watched(moves, execute)(moves, value, comm)]
    if not admitted:
        return run_fused(moves, values, comm)
    return comm.watched(moves, execute_fused)(moves, values, comm)


def _absent(moves: Plan | Fused, comm: Any) -> bool:
    """Whether this is a rank that is in none of the meshes."""
    meshes = [mesh for p in plans_of(moves) for mesh in (p.src.mesh, p.dst.mesh)]
    return not any(inside(comm, mesh) for mesh in meshes)


def admit(
    job: Plan | Fused | Program,
    comm: Comm[Value],
    types: Sequence[TensorType],
    values: Sequence[Value],
    check: Check | None = None,
) -> None:
    """Agrees with the other ranks on the first use of a plan; later looks at the values only."""
    try:
        check = check or comm.check
    except AttributeError:
        refuse_no_comm(comm)
        raise
    if check in EVERY_CALL or (check == "first" and job.digest not in comm.agreed):
        wrong = [m for m in map(comm.mistake, values, types) if m]
        about, digest = _KINDS[job.__class__], job.digest
        if tracked(values):  # ranks that differ in this would wait for each other in the backward
            about, digest = f"{about} with its gradient", digest_of(f"{digest} with its gradient")
        meshes = dict.fromkeys(meshes_of(job))
        told = Digest(digest, *_told(job))
        comm.agree(about, told, list(meshes), wrong[0] if wrong else None)
        comm.agreed.add(job.digest)
        if check == "values":
            compare(about, comm, list(meshes), _held(job, types, values, comm))
        return
    for value, type in zip(values, types, strict=True):
        mistake = comm.mistake(value, type)
        if mistake:
            comm.refuse(_KINDS[job.__class__], mistake, meshes_of(job))


def _told(job: Plan | Fused | Program) -> tuple[object, ...]:
    """What an error shows of it on ranks that differ."""
    if isinstance(job, Fused):
        return job, *(plan.cost for plan in job.plans[:1])
    return job, job.cost


def _held(
    job: Plan | Fused | Program, types: Sequence[TensorType], values: Sequence[Any], comm: Any
) -> dict[str, tuple[Any, TensorType]]:
    """What runs, by name, with its type: the inputs, and what a program has closed over."""
    held = inputs(values, types)
    if isinstance(job, Program):
        for i, (_, tensor) in enumerate(job.constants):
            type = TensorType(tuple(tensor.shape), tensor.dtype, job.mesh.layout())
            held[f"constant {i}, {type}"] = comm.value([tensor] * comm.width(type)), type
    return held


_KINDS = {Plan: "this plan", Fused: "this fused plan", Program: "this program"}


@attrs.frozen
class Deed:
    """A call that is neither a plan nor a program, told by its name."""

    name: str
    mesh: Mesh

    @property
    def digest(self) -> str:
        """The hexadecimal fingerprint of the name."""
        return digest_of(self.name)

    def __str__(self) -> str:
        return self.name


def meshes_of(job: Any) -> list[Mesh]:
    """The meshes whose ranks take part in a plan, fused ones, a program or a deed."""
    if not isinstance(job, (Plan, Fused)):
        return [job.mesh]
    return [mesh for p in plans_of(job) for mesh in (p.src.mesh, p.dst.mesh)]


def execute(moves: Plan, value: Value, comm: Comm[Value]) -> Value:
    """`value` after every step, without checks and without autograd."""
    if not moves.steps:
        return value if _absent(moves, comm) else comm.copy(value)
    owned = False
    for step in moves.steps:
        value = comm.perform(step, value, owned)
        owned = True
    return value


def execute_fused(fused: Fused, values: Sequence[Value], comm: Comm[Value]) -> list[Value]:
    """The values after their plans, whose exchanges meet in rounds."""
    done = [comm.copy(v) if not p.steps else v for p, v in zip(fused.plans, values, strict=True)]
    todo = [list(p.steps) for p in fused.plans]
    while any(todo):
        meeting = []
        for i, steps in enumerate(todo):
            while steps and not isinstance(steps[0].collective, Exchange):
                done[i] = comm.perform(steps.pop(0), done[i])
            if steps:
                meeting.append(i)
        if meeting:
            steps = [todo[i].pop(0) for i in meeting]
            values = comm.perform_together(steps, [done[i] for i in meeting])
            for i, value in zip(meeting, values, strict=True):
                done[i] = value
    return done
