"""The time it takes to plan: fdtensor, and torch's greedy and graph planners, on the same pairs.

Meshes have 1 to 5 axes of size 2, tensors 2 or 4 dims. Pairs of placements are drawn at random from
a fixed seed, from R, S and P(sum) to R and S; every other tensor has uneven blocks. Uncached means
that all caches are emptied before each plan; layouts and specs are made beforehand. The graph
planner gets as many of the pairs as fit in a few seconds. Times are those of the processor, so that
a busy machine does not count.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import _redistribute as theirs
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Placement, Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.planner import plan
from fdtensor.plans.routes import route
from tests.bench.traffic import as_torch

__all__ = ["Million", "Planned", "Times", "million", "planned", "pretend"]

SHAPES = {
    2: ((6144, 4096), (6143, 4095)),
    4: ((64, 96, 128, 64), (63, 95, 127, 61)),
}
"""For each number of dims an even shape and one that is uneven on every mesh."""

MILLION = Mesh(dp=16, pp=64, tp=1024)
"""1,048,576 ranks."""

OTHER = Mesh(a=512, b=2048)
"""The same ones in another mesh."""

Pair = tuple[TensorType, TensorType]


@attrs.frozen
class Times:
    """How long some plans took, in ms."""

    count: int
    median_ms: float
    worst_ms: float


@attrs.frozen
class Planned:
    """Planning with `axes` axes of size 2 and `dims` dims; graph is None where it was left out."""

    axes: int
    dims: int
    fdtensor: Times
    greedy: Times
    graph: Times | None
    cached_us: float
    """fdtensor, asked again."""
    greedy_cached_us: float


@attrs.frozen
class Million:
    """A plan, and then what one rank sends and receives, on a mesh of a million ranks."""

    src: str
    dst: str
    plan_ms: float
    route_ms: float
    """The messages of the rank in the middle, for all steps, when the plan is there."""
    messages: int


def pretend(rank: int, world: int) -> None:
    """Makes the process one of a world where collectives do nothing, in place of its real one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def planned(axes: int, dims: int, sample: int, graph_seconds: float) -> Planned:
    """Planning times of a sample of pairs; a process group must be there, for torch's meshes."""
    mesh = Mesh(**{f"a{i}": 2 for i in range(axes)})
    pairs = list(_pairs(mesh, dims, sample))
    device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.axes)
    specs = [(_spec(a, device_mesh), _spec(b, device_mesh)) for a, b in pairs]
    _timed(plan, pairs[:2], _forget)
    _timed(_graph(False), specs[:2], theirs.clear_redistribute_planner_cache)

    own = _timed(plan, pairs, _forget)
    greedy = _timed(_graph(False), specs, theirs.clear_redistribute_planner_cache)
    graph = None
    if graph_seconds:
        clear = theirs.clear_redistribute_planner_cache
        graph = _timed(_graph(True), specs, clear, graph_seconds)
    cached = theirs._gen_transform_infos
    return Planned(axes, dims, own, greedy, graph, _again(plan, pairs[0]), _again(cached, specs[0]))


def million() -> list[Million]:
    """Plans on a mesh of a million ranks, of each kind of change."""
    R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial("sum")
    changes = [
        ((S0, S1, R), (S1, S0, R)),
        ((S0, R, S1), (S1, S0)),
        ((S0, R, S1), (R, R, S1)),
        ((S0, S0, S1), (R, S0, S1)),
        ((P, S0, S1), (S0, S0, S1)),
        ((R, P, S0), (R, R, S0)),
    ]
    shape = (1 << 16, 1 << 16)
    found = []
    for before, after in changes:
        src = TensorType(shape, torch.float32, Layout(MILLION, before))
        mesh = MILLION if len(after) == MILLION.ndim else OTHER
        dst = src.with_layout(Layout(mesh, after))
        _forget()
        start = time.process_time()
        made = plan(src, dst)
        middle = time.process_time()
        routes = [route(step.moves, MILLION.size // 2) for step in made.steps]
        end = time.process_time()
        messages = sum(len(r.sends) + len(r.recvs) for r in routes)
        times = 1e3 * (middle - start), 1e3 * (end - middle)
        found.append(Million(_text(before), _text(after), *times, messages))
    return found


def _text(placements: Sequence[Placement]) -> str:
    return f"({','.join(map(str, placements))})"


def _pairs(mesh: Mesh, dims: int, sample: int) -> Sequence[Pair]:
    generator = random.Random(f"{mesh.ndim} {dims}")
    found = []
    while len(found) < sample:
        cut: list[Placement] = [Replicate(), *map(Shard, range(dims))]
        before = Layout(mesh, [generator.choice([*cut, Partial("sum")]) for _ in mesh.axes])
        after = Layout(mesh, [generator.choice(cut) for _ in mesh.axes])
        if before is not after:
            src = TensorType(SHAPES[dims][len(found) % 2], torch.float32, before)
            found.append((src, src.with_layout(after)))
    return found


def _spec(type: TensorType, device_mesh: DeviceMesh) -> DTensorSpec:
    shape = torch.Size(type.shape)
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), type.dtype)
    return DTensorSpec(device_mesh, tuple(as_torch(type.layout)), tensor_meta=meta)


def _graph(enabled: bool) -> Callable[[DTensorSpec, DTensorSpec], Any]:
    return lambda src, dst: theirs._gen_transform_infos_non_cached(src, dst, enabled)


def _timed(
    make: Callable[[Any, Any], Any],
    pairs: Sequence[tuple[Any, Any]],
    forget: Callable[[], None],
    seconds: float = 600.0,
) -> Times:
    times: list[float] = []
    for src, dst in pairs:
        forget()
        start = time.process_time()
        make(src, dst)
        times.append(1e3 * (time.process_time() - start))
        if sum(times) > 1e3 * seconds:
            break
    return Times(len(times), median(times), max(times))


def _again(make: Callable[[Any, Any], Any], pair: tuple[Any, Any], count: int = 2000) -> float:
    """The microseconds of a call that has been made before: the best of a few loops."""
    src, dst = pair
    make(src, dst)
    best = float("inf")
    for _ in range(7):
        start = time.process_time()
        for _ in range(count):
            make(src, dst)
        best = min(best, time.process_time() - start)
    return 1e6 * best / count


def _forget() -> None:
    """Empties every cache of fdtensor."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fdtensor.") and not name.startswith("tests.bench"):
            for value in vars(module).values():
                clear = getattr(value, "cache_clear", None)
                if clear is not None:
                    clear()
