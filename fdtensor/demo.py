"""The demo: real numbers walk through a chain of layouts, and every block is checked.

The numbers come with Python: for each character of Unicode's Basic Multilingual Plane, 256 rows of
256, its general category as `unicodedata` has it, counted from 0 in alphabetical order.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from fdtensor.inspect.pictures import show
from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Placement, Ragged, Replicate, Shard, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collectives import is_local
from fdtensor.plans.planner import Plan
from fdtensor.plans.text import bytes_text
from fdtensor.runtime.comm import Comm
from fdtensor.tensors.connect import distribute
from fdtensor.tensors.distribution import local_blocks
from fdtensor.testing.values import block, gather_full

__all__ = ["SOURCE", "Stop", "numbers", "stops", "walk"]

SOURCE = f"65,536 general categories of Unicode {unicodedata.unidata_version}"


@attrs.frozen
class Stop:
    """One redistribution of the walk: its plan, and what was wrong on which rank."""

    plan: Plan
    ranks: int
    mistakes: tuple[str, ...]


def numbers() -> torch.Tensor:
    """The categories as int64, shape (256, 256): the row is the high byte of the character."""
    names = [unicodedata.category(chr(code)) for code in range(256 * 256)]
    places = {name: i for i, name in enumerate(sorted(set(names)))}
    return torch.tensor([places[name] for name in names]).reshape(256, 256)


def stops(mesh: Mesh, shape: Sequence[int], dtype: torch.dtype) -> Iterator[TensorType]:
    """The types that the walk visits, one after the other; the first one is replicated."""
    first, last = mesh.axes[0], mesh.axes[-1]

    def at(**placements: Placement) -> Layout:
        return Layout(mesh, [placements.get(axis, Replicate()) for axis in mesh.axes])

    def both(a: Placement, b: Placement) -> Layout:
        return at(**{first: a, last: b})

    rows, columns, copy = Shard(0), Shard(1), Replicate()
    layouts = [at(), both(rows, copy), at(), both(copy, columns), both(copy, rows)]
    if mesh.ndim > 1:
        layouts += [
            both(rows, columns),
            both(columns, rows),
            both(rows, rows),
            both(copy, rows),
            mesh.layout((last, first)),
            mesh.layout((first, last)),
            both(Partial("sum"), rows),
            both(rows, rows),
            both(rows, Partial("max")),
            both(Partial("sum"), columns),
            both(columns, copy),
        ]
    layouts += [
        both(StridedShard(0, 3), copy),
        both(_ragged(mesh, first, shape[0]), copy),
        both(columns, copy),
    ]
    for op in ("sum", "max", "min", "product", *_own_ops(dtype)):
        term = Partial(op)  # type: ignore[arg-type]
        layouts += [both(term, copy), both(columns, copy), both(copy, columns), both(copy, term)]
        layouts += [at()]
    if dtype.is_floating_point:
        layouts += [both(Partial(op), copy) for op in ("sum", "avg", "sum")]
    whole = at(**dict.fromkeys(mesh.axes, Partial("sum")))
    layouts += [whole, both(rows, copy), at()]
    for layout in layouts:
        yield TensorType(shape, dtype, layout)
    others = [Mesh.from_ranks(mesh.ranks[::-1], ("line",))]
    others.append(Mesh.from_ranks(mesh.ranks[: max(1, mesh.size - 1)], ("fewer",)))
    for other in others:
        yield TensorType(shape, dtype, other.layout(other.axes[0]))
        yield TensorType(shape, dtype, other.layout(None, other.axes[0]))
    yield TensorType(shape, dtype, both(rows, copy))


def _own_ops(dtype: torch.dtype) -> tuple[str, ...]:
    return ("avg",) if dtype.is_floating_point else ("band", "bor", "bxor")


def _ragged(mesh: Mesh, axis: str, size: int) -> Ragged:
    """Blocks of quite different sizes: the first gets nothing, the last all that is left."""
    count = mesh.axis_size(axis)
    sizes = [size * i // (count * count) for i in range(count - 1)]
    return Ragged(0, (*sizes, size - sum(sizes)))


def walk(mesh: Mesh, comm: Comm[Any], everyone: Callable[[Any], Sequence[Any]]) -> list[Stop]:
    """Walks even and uneven tensors of integers and floats through all stops.

    Every rank checks its block against slicing the full tensor. Where terms are pending,
    `everyone(local)` gives the local tensors of all ranks, in mesh order, which are then reduced.
    """
    table = numbers()
    visited = []
    for tensor in (table, table[:251, :253], table.to(torch.float64)):
        types = stops(mesh, tuple(tensor.shape), tensor.dtype)
        value = distribute(tensor, next(types).layout, comm)
        for type in types:
            plan = value.plan_to(type)
            value = value.redistribute(type)
            mistakes = _check(tensor, type, value.local, comm, everyone)
            visited.append(Stop(plan, type.mesh.size, tuple(mistakes)))
    return visited


def _check(
    tensor: torch.Tensor,
    type: TensorType,
    local: Any,
    comm: Comm[Any],
    everyone: Callable[[Any], Sequence[Any]],
) -> list[str]:
    if type.layout.partial:
        try:
            total = gather_full(everyone(local), type)
        except AssertionError as error:
            return [str(error)]
        return [] if torch.equal(total, tensor) else [f"the terms of {type} do not add up"]
    wrong = []
    for r, own in local_blocks(local, type.mesh, comm):
        if not torch.equal(own, block(tensor, type, r)):
            wrong.append(f"rank {r} has a wrong block of {type}")
    return wrong


def report(
    walks: Sequence[Sequence[Stop]], write: Callable[[str], None], verbose: bool = False
) -> bool:
    """Writes a table of the tensors, one plan with a picture, what was wrong, and the verdict.

    `walks` has the stops of each process. If `verbose`, all plans are written. Returns whether
    everything was right.
    """
    mistakes = [_mistakes(same) for same in zip(*walks, strict=True)]
    stops = walks[0]
    if verbose:
        for stop, texts in zip(stops, mistakes, strict=True):
            verdict = "; ".join(texts) if texts else f"right on {stop.ranks} ranks"
            write(f"{_plan_text(stop.plan)}; {verdict}\n")
    else:
        write("each rank compares its block with a slice of the full tensor\n")
        write(_table(stops))
        longest = max(stops, key=lambda stop: len(stop.plan.steps)).plan
        write(f"\none of the plans, and the layout it leads to\n\n{_plan_text(longest)}\n")
        write(f"{show(longest.dst)}\n")
        wrong = sorted({text for texts in mistakes for text in texts})
        for text in wrong[:10]:
            write(f"wrong: {text}")
        if len(wrong) > 10:
            write(f"wrong: {len(wrong) - 10} more")
    verdict = "THERE ARE WRONG BLOCKS" if any(mistakes) else "every block is right"
    moved = sum(stop.plan.total_bytes for stop in stops)
    least = sum(stop.plan.least_total_bytes for stop in stops)
    write(
        f"{len(stops)} redistributions of {SOURCE}: {bytes_text(moved)} moved, "
        f"{moved / max(1, least):.3f} times the least; {verdict}."
    )
    return not any(mistakes)


def _mistakes(stops: Sequence[Stop]) -> list[str]:
    """The different mistakes of all processes at one stop, in order."""
    return sorted({text for stop in stops for text in stop.mistakes})


def _plan_text(plan: Plan) -> str:
    figures = f"all ranks receive {bytes_text(plan.total_bytes)}, the least is "
    figures += f"{bytes_text(plan.least_total_bytes)}; peak {bytes_text(plan.peak_bytes)}"
    return f"{plan}\n  {figures}"


def _table(stops: Sequence[Stop]) -> str:
    """A row for each tensor that walked: its redistributions, collectives and bytes."""
    lines = ["tensor          redistributions  collectives  bytes moved  the least"]
    tensors = dict.fromkeys((stop.plan.dst.shape, stop.plan.dst.dtype) for stop in stops)
    for shape, dtype in tensors:
        plans = [s.plan for s in stops if (s.plan.dst.shape, s.plan.dst.dtype) == (shape, dtype)]
        steps = sum(not is_local(step) for plan in plans for step in plan.steps)
        moved = bytes_text(sum(plan.total_bytes for plan in plans))
        least = bytes_text(sum(plan.least_total_bytes for plan in plans))
        tensor = f"{dtype_name(dtype)}[{','.join(map(str, shape))}]"
        lines.append(f"{tensor:<14}  {len(plans):>15}  {steps:>11}  {moved:>11}  {least:>9}")
    return "\n".join(lines)


def on_this_rank(mesh: Mesh) -> list[Stop]:
    """The walk on one rank of a real mesh; the process group is up."""
    import torch.distributed as dist

    from fdtensor.runtime.funcol import FuncolComm
    from fdtensor.runtime.process_groups import default_device

    def everyone(local: torch.Tensor) -> list[Any]:
        locals_of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(locals_of_ranks, local.cpu())
        return [locals_of_ranks[rank] for rank in mesh.order]

    return walk(mesh, FuncolComm(mesh, default_device()), everyone)


def on_processes(mesh: Mesh) -> list[list[Stop]]:
    """The walk on gloo processes that are started for it, one a rank."""
    from fdtensor.testing.pool import GlooPool, WorkerError

    with GlooPool(mesh.size, timeout=300) as pool:
        try:
            return pool.run(on_this_rank, mesh)
        except WorkerError as error:
            raise FdtensorError(f"the demo failed: {error}") from error


def simulated(mesh: Mesh) -> list[list[Stop]]:
    """The walk with all ranks in this process."""
    from fdtensor.runtime.simulator import SimulatedComm

    return [walk(mesh, SimulatedComm(mesh), lambda local: local)]
