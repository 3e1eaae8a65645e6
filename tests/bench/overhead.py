"""The time of a call when its collectives are free: a fake process group, and tensors of 8 by 8.

`bare` are the collectives of the plan alone, with a wait for each, on tensors that are there
already, and below autograd, whose kernels for them are slow once DTensor is imported; for a plan
without any it is the copy. What a call takes above that is fdtensor's own: looking up the plan,
checks, cutting, packing and placing blocks. Times are the best of a few loops, in microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fdtensor.layouts.mesh import Mesh
from fdtensor.plans.collectives import AllGather, AllReduce, AllToAll, Exchange, ReduceScatter, Step
from fdtensor.plans.cost import GLOO, NCCL
from fdtensor.plans.routes import route
from fdtensor.runtime.control.process import groups
from fdtensor.runtime.funcol import FuncolComm
from fdtensor.tensors.connect import from_local
from tests.bench.cases import CASES, NOTHING, Case
from tests.bench.traffic import as_dtensor, as_torch, device_mesh

__all__ = ["OVERHEADS", "Overhead", "overhead"]

OVERHEADS = (
    NOTHING,
    *(
        case
        for name in ("R->S0", "S0->R", "S0->S1", "S0->S1 uneven", "P->R", "P->S0")
        for case in CASES
        if case.name == name
    ),
    *(case for case in CASES if case.name in ("(S0,S1)->(S1,S0)", "(S0,S0)->(R,S0)")),
)
"""The cases whose calls are timed."""

SIZE = (8, 8)

LOOPS = 30
"""Loops of which the fastest counts: short ones, since others may want the processor."""

_ops = torch.ops._c10d_functional


@attrs.frozen
class Overhead:
    """What a call of a case takes with the plan that a cost model gives, in microseconds."""

    case: str
    cost: str
    plan: tuple[str, ...]
    bare_us: float
    fdtensor_us: float
    dtensor_us: float

    @property
    def above_us(self) -> float:
        """What fdtensor adds to its bare collectives."""
        return self.fdtensor_us - self.bare_us


def overhead(case: Case, nccl: bool, count: int) -> Overhead:
    """The case on one rank of a pretended world of 4; `count` calls a loop."""
    rank = dist.get_rank()
    x, _ = case.tensors(SIZE, rank)
    start, end = case.types(SIZE)
    cost = NCCL if nccl else GLOO
    with torch.no_grad():
        mine = from_local(x, start, FuncolComm(case.mesh, cost=cost))
        theirs, placements = as_dtensor(x, start, device_mesh(case.mesh)), as_torch(end.layout)
        found = mine.plan_to(end.layout)
        calls = [call for step in found.steps for call in _bare(step, rank)] or [x.clone]

        def bare() -> None:
            with torch._C._AutoDispatchBelowAutograd():  # type: ignore[attr-defined]
                for call in calls:
                    call()

        return Overhead(
            case.name,
            cost.name,
            tuple(str(step.collective) for step in found.steps),
            _fastest(bare, count),
            _fastest(lambda: mine.redistribute(end.layout), count),
            _fastest(lambda: theirs.redistribute(placements=placements), count),
        )


def _fastest(call: Callable[[], Any], count: int) -> float:
    best = float("inf")
    for _ in range(LOOPS):
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / count


def _bare(step: Step, rank: int) -> list[Callable[[], Any]]:
    """The collectives of a step, on tensors of the right size."""
    mesh, numel = step.src.mesh, prod(step.src.local_shape(rank))
    wire = torch.zeros(numel)
    wait = _ops.wait_tensor.default
    match step.collective:
        case AllGather(axes):
            k, name = _group(mesh, axes)
            gather = _ops.all_gather_into_tensor.default
            return [lambda: wait(gather(wire, k, name))]
        case AllReduce(axes, reduce_op):
            _, name = _group(mesh, axes)
            return [lambda: wait(_ops.all_reduce.default(wire, reduce_op, name))]
        case ReduceScatter(axes, _, reduce_op):
            k, name = _group(mesh, axes)
            scatter = _ops.reduce_scatter_tensor.default
            return [lambda: wait(scatter(wire, reduce_op, k, name))]
        case AllToAll(axes):
            k, name = _group(mesh, axes)
            sizes = [numel // k] * k
            return [lambda: wait(_ops.all_to_all_single.default(wire, sizes, sizes, name))]
        case Exchange(way="peer_to_peer"):
            return [_messages(step, rank)]
        case Exchange(axes) if axes is not None:
            return [_all_to_all(step, rank, axes)]
    return []


def _messages(step: Step, rank: int) -> Callable[[], Any]:
    world: Any = dist.group.WORLD
    here = route(step.moves, rank)
    recvs = [([torch.zeros(m.numel)], m.peer) for m in here.recvs]
    sends = [([torch.zeros(m.numel)], m.peer) for m in here.sends]

    def messages() -> None:
        works = [world.recv(tensors, peer, 1) for tensors, peer in recvs]
        works += [world.send(tensors, peer, 1) for tensors, peer in sends]
        for work in works:
            work.wait()

    return messages


def _all_to_all(step: Step, rank: int, axes: tuple[str, ...]) -> Callable[[], Any]:
    here, name = route(step.moves, rank), _group(step.src.mesh, axes)[1]
    coord = step.src.mesh.coord(rank)
    assert coord is not None
    ranks = sorted(step.src.mesh.coset(axes, coord))
    received, sent = ({m.peer: m.numel for m in some} for some in (here.recvs, here.sends))
    outs, ins = [received.get(r, 0) for r in ranks], [sent.get(r, 0) for r in ranks]
    wire = torch.zeros(sum(ins))
    op, wait = _ops.all_to_all_single.default, _ops.wait_tensor.default
    return lambda: wait(op(wire, outs, ins, name))


def _group(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, str]:
    """The size and name of this rank's group along `axes`."""
    [(name, ranks)] = groups(mesh, *axes).items()
    return len(ranks), name
