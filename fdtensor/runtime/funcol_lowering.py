"""`spelled`: a step of a plan as functional collectives and local ops of one rank."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers what the ops give on fake tensors

from fdtensor.layouts.blocks import locate
from fdtensor.ops.graph import Full, Graph
from fdtensor.ops.recorder import record
from fdtensor.plans.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    ReduceScatter,
    Slice,
    Step,
)
from fdtensor.plans.messages import talk
from fdtensor.plans.tiling import along, join, split
from fdtensor.plans.transitions import by_exchange
from fdtensor.runtime.funcol import exchanging, reducing
from fdtensor.runtime.kernel import divide, flat, keep, local_step, settle
from fdtensor.runtime.kernel import packed as packed_part
from fdtensor.runtime.packing import cut, rounds
from fdtensor.runtime.process_groups import group_name
from fdtensor.runtime.wire import from_wire, reduces_as, to_wire

__all__ = ["spelled"]

_ops = torch.ops._c10d_functional
_wait = _ops.wait_tensor.default


@functools.lru_cache(maxsize=16384)
def spelled(
    steps: tuple[Step, ...], rank: int, backend: str = "gloo", device: str = "cpu"
) -> Graph:
    """What `rank` calls for steps that travel together: a graph from its blocks to the new ones."""
    blocks = [Full(step.src.local_shape(rank), step.src.dtype) for step in steps]

    def body(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if len(steps) == 1:
            return [_done(steps[0], rank, backend, tensors[0])]
        return _together(steps, rank, backend, tensors)

    return record(body, blocks, device=device)


def _together(
    steps: tuple[Step, ...], rank: int, backend: str, tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Steps of one kind as one collective of what they carry, side by side."""
    first = steps[0].collective
    op = "sum"
    if isinstance(first, (AllReduce, ReduceScatter)):
        op = reduces_as(steps[0].src.dtype, first.reduce_op, backend)
    if op is None or isinstance(first, Exchange):
        return [_done(step, rank, backend, x) for step, x in zip(steps, tensors)]
    assert isinstance(first, (AllReduce, ReduceScatter, AllGather))
    count, group = _group(steps[0], rank, first.axes)
    dtype = tensors[0].dtype
    if isinstance(first, AllReduce):
        packed = torch.cat([x.reshape(-1) for x in tensors])
        moved = from_wire(_wait(_ops.all_reduce(to_wire(packed), op, group)), dtype)
        parts = moved.split([x.numel() for x in tensors])
        outs = [part.view(x.shape) for part, x in zip(parts, tensors)]
    elif isinstance(first, ReduceScatter):
        befores = [_tiles(step, rank, step.src) for step in steps]
        rows = [split(x, b).reshape(count, -1) for x, b in zip(tensors, befores)]
        packed = torch.cat(rows, 1).reshape(-1)
        wire = _ops.reduce_scatter_tensor(to_wire(packed), op, count, group)
        parts = from_wire(_wait(wire), dtype).split([r.shape[1] for r in rows])
        outs = [part.view(step.dst.local_shape(rank)) for part, step in zip(parts, steps)]
    else:
        packed = torch.cat([x.reshape(-1) for x in tensors])
        wire = _ops.all_gather_into_tensor(to_wire(packed), count, group)
        rows = from_wire(_wait(wire), dtype).view(count, -1)
        parts = rows.split([x.numel() for x in tensors], 1)
        return [
            join(part.reshape(count * x.shape[0], *x.shape[1:]), _tiles(step, rank, step.dst))
            for part, x, step in zip(parts, tensors, steps)
        ]
    return [divide(out, count) for out in outs] if first.reduce_op == "avg" else outs


def _tiles(step: Step, rank: int, whole: Any) -> Any:
    """How the even blocks of a gather or a reduce_scatter lie in the whole."""
    collective = step.collective
    assert isinstance(collective, (AllGather, ReduceScatter))
    return along(step.src.mesh, collective.axes, whole.local_shape(rank), collective.dims)


def _done(step: Step, rank: int, backend: str, x: torch.Tensor) -> torch.Tensor:
    collective, src, dst, mesh = step.collective, step.src, step.dst, step.src.mesh
    match collective:
        case Slice():
            return _sliced(step, rank, x)
        case Exchange():
            return _exchanged(step, rank, x)
        case AllGather(axes, dims):
            after = along(mesh, axes, dst.local_shape(rank), dims)
            count, group = _group(step, rank, axes)
            wire = _ops.all_gather_into_tensor(to_wire(x.contiguous()), count, group)
            return join(from_wire(_wait(wire), x.dtype), after)
        case AllToAll(axes, src_dim, dst_dim):
            before = along(mesh, axes, src.local_shape(rank), (dst_dim,) * len(axes))
            after = along(mesh, axes, dst.local_shape(rank), (src_dim,) * len(axes))
            count, group = _group(step, rank, axes)
            wire = to_wire(split(x, before))
            sizes = [wire.shape[0] // count] * count
            arrived = _wait(_ops.all_to_all_single(wire, sizes, sizes, group))
            return join(from_wire(arrived, x.dtype), after)
        case AllReduce(axes, reduce_op):
            op = reduces_as(src.dtype, reduce_op, backend)
            if op is None:
                for by in reducing(step):
                    x = _done(by, rank, backend, x)
                return x
            count, group = _group(step, rank, axes)
            total = from_wire(_wait(_ops.all_reduce(to_wire(x.contiguous()), op, group)), x.dtype)
            return divide(total, count) if reduce_op == "avg" else total
        case ReduceScatter(axes, dims, reduce_op):
            op = reduces_as(src.dtype, reduce_op, backend)
            if op is None:
                return _exchanged(by_exchange(src, dst, "all_to_all"), rank, x)
            before = along(mesh, axes, src.local_shape(rank), dims)
            count, group = _group(step, rank, axes)
            wire = _ops.reduce_scatter_tensor(to_wire(split(x, before)), op, count, group)
            out = from_wire(_wait(wire), x.dtype)
            return divide(out, count) if reduce_op == "avg" else out
        case Broadcast():
            raise AssertionError("a program runs on one mesh, a broadcast joins two")
        case _:
            return local_step(step, rank, x)


def _group(step: Step, rank: int, axes: tuple[str, ...]) -> tuple[int, str]:
    """How many ranks a named collective joins, and the name of their group."""
    ranks = step.src.mesh.coset(axes, step.src.mesh.coord(rank) or ())
    return len(ranks), group_name(tuple(sorted(ranks)))


def _sliced(step: Step, rank: int, x: torch.Tensor) -> torch.Tensor:
    """A view of the block where it can be one."""
    shape = step.dst.local_shape(rank)
    if 0 in shape:  # such a block may come from any other
        return x.new_empty(shape)
    coord = step.src.mesh.coord(rank)
    assert coord is not None
    for d, (held, kept) in enumerate(zip(step.src.box(coord), step.dst.box(coord))):
        if held == kept:
            continue
        runs = locate(held, kept) if kept else ()
        if len(runs) == 1:
            x = x.narrow(d, runs[0][0], runs[0][1] - runs[0][0])
        elif runs:
            x = torch.cat([x.narrow(d, a, b - a) for a, b in runs], d)
        else:
            x = x.narrow(d, 0, 0)
    return x


def _exchanged(step: Step, rank: int, x: torch.Tensor) -> torch.Tensor:
    """An exchange as uneven all-to-alls of packed messages."""
    collective, src, dst = step.collective, step.src, step.dst
    assert isinstance(collective, Exchange)
    ranks = exchanging((step,), rank)
    place = {peer: i for i, peer in enumerate(ranks)}
    out = x.new_empty(dst.local_shape(rank))
    local, target = flat(x), flat(out)
    for now in rounds(step, rank):
        olds = cut(local, now.source) if now.source.parts else []
        parts: list[Any] = [x.new_empty(0)] * len(ranks)
        for parcel in now.sends:
            parts[place[parcel.peer]] = packed_part(parcel.part, olds[parcel.index]).reshape(-1)
        sizes = [0] * len(ranks)
        for parcel in now.recvs:
            sizes[place[parcel.peer]] = parcel.part.numel
        counts = [part.numel() for part in parts]
        wire = _ops.all_to_all_single(to_wire(torch.cat(parts)), sizes, counts, group_name(ranks))
        came = from_wire(_wait(wire), x.dtype)
        slots = torch.split_with_sizes(came, sizes)
        arrived = [slots[place[p.peer]].view(p.part.shape) for p in now.recvs]
        news = cut(target, now.target)
        for parcel, term in zip(now.recvs, arrived):
            if parcel.in_place:
                news[parcel.index][0].copy_(term)
        keep(now, olds, news)
        settle(now, collective.reduce_op, olds, news, arrived)
        if not any(sizes):  # others wait for this rank, which must not skip what it does not need
            out = torch.cat([out.reshape(-1), came]).view(out.shape)
            target = flat(out)
    if collective.reduce_op == "avg":
        divide(out, talk(src, dst).terms)
    return out
