"""Time and bytes of each case on 4 gloo processes: fdtensor, DTensor and the best by hand.

A barrier comes before each timed call. A call takes as long as the rank that it takes longest on:
from when that rank starts until it has its block, with the wait for others; the ranks' times are
put together afterwards. The three are called in turns, so that a busy machine slows all of them,
and each round starts with another one. Every call makes a new tensor, and frees it after the clock
has stopped. fdtensor and DTensor are asked through their public `redistribute`, without autograd,
for a layout that they have planned before.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import placement_types as there

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.cost import GLOO
from fdtensor.plans.planner import Plan
from fdtensor.runtime.funcol import FuncolComm
from fdtensor.tensors.connect import from_local
from fdtensor.testing.pool import GlooPool
from tests.bench.cases import Case, Shape
from tests.bench.count import Received
from tests.bench.hand import HAND
from tests.bench.place import Place

__all__ = ["Traffic", "as_dtensor", "as_torch", "compare", "device_mesh"]

Calls = Mapping[str, Callable[[], torch.Tensor]]

WARM = 2
"""Calls of each kind that are not counted."""


@attrs.frozen
class Traffic:
    """What a case took at a size. Times are medians in ms, ratios medians of those of each round.

    Bytes are those that the busiest rank received, counted from the collectives that ran.
    """

    case: str
    shape: Shape
    plan: tuple[str, ...]
    hand: str
    """The name of the fastest way by hand."""
    candidates: dict[str, float]
    """The ms of each way by hand, measured beforehand."""
    rounds: int
    fdtensor_ms: float
    dtensor_ms: float
    hand_ms: float
    fdtensor_to_hand: float
    dtensor_to_fdtensor: float
    fdtensor_bytes: int
    dtensor_bytes: int
    hand_bytes: int
    announced_bytes: int
    """What the plan says that the busiest rank receives."""
    bound_bytes: int
    ops: dict[str, tuple[str, ...]]
    """The collectives and messages that rank 1 received by."""
    equal: bool
    """Whether every rank got the right block from all three, and from every way by hand."""


@attrs.frozen
class _Ran:
    """What one rank saw: the seconds of every call, and bytes and ops of one call of each."""

    seconds: dict[str, list[float]]
    bytes: dict[str, int]
    ops: dict[str, tuple[str, ...]]
    equal: bool
    plan: Plan | None


def compare(pool: GlooPool, case: Case, size: Shape, rounds: int, tries: int) -> Traffic:
    """The case at a size, on 4 ranks; `tries` rounds choose among the ways by hand."""
    ways = [way.__name__ for way in HAND[case.name]]
    tried = pool.run(_ranked, case, size, ways, False, tries, timeout=300)
    candidates = {way: 1e3 * median(_slowest(tried, way)) for way in ways}
    best = min(ways, key=lambda way: candidates[way])
    ran = pool.run(_ranked, case, size, [best], True, rounds, timeout=600)
    seconds = {name: _slowest(ran, name) for name in ("fdtensor", "dtensor", best)}
    nbytes = {name: max(one.bytes[name] for one in ran) for name in seconds}
    plan = ran[0].plan
    assert plan is not None
    return Traffic(
        case=case.name,
        shape=case.shape(size),
        plan=tuple(str(step.collective) for step in plan.steps),
        hand=best,
        candidates=candidates,
        rounds=rounds,
        fdtensor_ms=1e3 * median(seconds["fdtensor"]),
        dtensor_ms=1e3 * median(seconds["dtensor"]),
        hand_ms=1e3 * median(seconds[best]),
        fdtensor_to_hand=_ratio(seconds["fdtensor"], seconds[best]),
        dtensor_to_fdtensor=_ratio(seconds["dtensor"], seconds["fdtensor"]),
        fdtensor_bytes=nbytes["fdtensor"],
        dtensor_bytes=nbytes["dtensor"],
        hand_bytes=nbytes[best],
        announced_bytes=plan.received_bytes,
        bound_bytes=plan.lower_bound_bytes,
        ops={name if name != best else "hand": ops for name, ops in ran[1].ops.items()},
        equal=all(one.equal for one in (*tried, *ran)),
    )


def _slowest(ran: Sequence[_Ran], name: str) -> list[float]:
    return [max(times) for times in zip(*[one.seconds[name] for one in ran], strict=True)]


def _ratio(these: Sequence[float], those: Sequence[float]) -> float:
    return median(a / b for a, b in zip(these, those, strict=True))


# --- on a rank -------------------------------------------------------------------------------


def _ranked(case: Case, size: Shape, ways: list[str], beside: bool, rounds: int) -> _Ran:
    """Checks, counts and times the ways by hand, with `beside` next to fdtensor and DTensor."""
    rank = dist.get_rank()
    x, wanted = case.tensors(size, rank)
    mesh = device_mesh(case.mesh)
    at = Place(rank, case.shape(size), mesh.get_group(0) if mesh.ndim == 2 else None)
    known = {way.__name__: way for way in HAND[case.name]}
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    found = None
    with torch.no_grad():
        if beside:
            start, end = case.types(size)
            mine = from_local(x, start, _comm(start.mesh))
            found = mine.plan_to(end.layout)
            theirs, placements = as_dtensor(x, start, mesh), as_torch(end.layout)
            calls["fdtensor"] = lambda: mine.redistribute(end.layout).local
            calls["dtensor"] = lambda: theirs.redistribute(placements=placements).to_local()
        calls |= {name: functools.partial(known[name], x, at) for name in ways}
        right = [torch.equal(call(), wanted) for call in calls.values()]
        counted = {}
        for name, call in calls.items():
            with Received() as received:
                call()
            counted[name] = received
        seconds = _seconds(calls, rounds)
    nbytes = {name: one.bytes for name, one in counted.items()}
    return _Ran(
        seconds, nbytes, {n: tuple(one.ops) for n, one in counted.items()}, all(right), found
    )


def _seconds(calls: Calls, rounds: int) -> dict[str, list[float]]:
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(WARM + rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            call = calls[name]
            dist.barrier()
            start = time.perf_counter()
            result = call()
            took = time.perf_counter() - start
            del result
            if i >= WARM:
                seconds[name].append(took)
    return seconds


@functools.cache
def _comm(mesh: Mesh) -> FuncolComm:
    return FuncolComm(mesh, cost=GLOO)


# --- for torch -------------------------------------------------------------------------------


@functools.cache
def device_mesh(mesh: Mesh) -> DeviceMesh:
    """The DeviceMesh of a mesh, made once; collective."""
    return init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.axes)


def as_torch(layout: Layout) -> list[there.Placement]:
    """The torch placements of a layout that has R, S and P(sum) only."""
    placements: list[there.Placement] = []
    for placement in layout.placements:
        match placement:
            case Replicate():
                placements.append(there.Replicate())
            case Shard(dim):
                placements.append(there.Shard(dim))
            case Partial("sum"):
                placements.append(there.Partial("sum"))
            case _:
                raise NotImplementedError(str(placement))
    return placements


def as_dtensor(x: torch.Tensor, type: TensorType, mesh: DeviceMesh) -> TorchDTensor:
    """The torch DTensor whose block is `x`."""
    shape, stride = torch.Size(type.shape), (type.shape[1], 1)
    return TorchDTensor.from_local(
        x, mesh, as_torch(type.layout), run_check=False, shape=shape, stride=stride
    )
