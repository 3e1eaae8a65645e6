"""Memory: what a rank holds beside its source and destination block while steps run.

These are the tensors that the kernels make, no estimate: a test counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fdtensor.layouts.blocks import Box, length, select
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collective import (
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
    Step,
)
from fdtensor.plans.messages import Message, Route, route
from fdtensor.plans.tiling import along

__all__ = ["outermost", "peak_at", "piece"]


def contiguous(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box of a contiguous tensor of `shape` is contiguous too."""
    seen = False
    for held, size in zip(box, shape, strict=True):
        if len(held) != 1:
            return False
        extent = held[0][1] - held[0][0]
        if seen and extent != size:
            return False
        seen = seen or extent > 1
    return True


def piece(message: Message, index: int, count: int) -> Message:
    """Part `index`, of `count`, of a message: a share of its longest dim."""
    if count == 1:
        return message
    d = max(range(len(message.box)), key=lambda d: length(message.box[d]))
    size = length(message.box[d])
    part = select(message.box[d], size * index // count, size * (index + 1) // count)
    return Message(message.peer, (*message.box[:d], part, *message.box[d + 1 :]), message.term)


def buffers_at(step: Step, here: Route, pieces: int | None = None) -> int:
    """The elements that an exchange holds beside its source and destination block."""
    collective = step.collective
    assert isinstance(collective, Exchange)
    count = collective.pieces if pieces is None else pieces
    src_shape = _local_shape(step.src, here.rank)
    most = 0
    for i in range(count):
        sends = [piece(message, i, count) for message in here.sends]
        recvs = [piece(message, i, count) for message in here.recvs]
        if collective.way == "all_to_all":
            total = sum(m.numel for m in sends) + sum(m.numel for m in recvs)
        else:
            packed = {m.box: m.numel for m in sends if not contiguous(m.box, src_shape)}
            landed = [m.numel for m in recvs if m.term or not contiguous(m.box, here.shape or ())]
            total = sum(packed.values()) + sum(landed)
        most = max(most, total)
    return most


def _local_shape(type: TensorType, rank: int) -> tuple[int, ...]:
    return (type.local_shape(rank) or (1,)) if type.mesh.coord(rank) is not None else ()


def _local_numel(type: TensorType, rank: int) -> int:
    return prod(type.local_shape(rank)) if type.mesh.coord(rank) is not None else 0


def peak_at(steps: Sequence[Step], rank: int) -> int:
    """The most bytes `rank` holds while the steps run, the caller's input counted."""
    first = steps[0].src
    caller = _local_numel(first, rank)
    most, held = caller, 0
    for step in steps:
        out = _local_numel(step.dst, rank)
        most = max(most, caller + held + _extra(step, rank, held > 0))
        held = out
    return most * first.dtype.itemsize


def _extra(step: Step, rank: int, owned: bool) -> int:
    """The elements of a step's output and buffers while it runs; `owned`: its input is not kept."""
    out, src = _local_numel(step.dst, rank), _local_numel(step.src, rank)
    match step.collective:
        case Slice() | Mask() | Pad() | Scale():
            return out
        case AllReduce():
            return 0 if owned else out
        case AllGather(axes, dims):
            return out if outermost(step.dst, rank, axes, dims) else 2 * out
        case ReduceScatter(axes, dims):
            return out if outermost(step.src, rank, axes, dims) else out + src
        case AllToAll(axes, src_dim, dst_dim):
            packed = 0 if outermost(step.src, rank, axes, (dst_dim,) * len(axes)) else src
            landed = 0 if outermost(step.dst, rank, axes, (src_dim,) * len(axes)) else out
            return packed + landed + out
        case Broadcast():
            return out
        case Exchange():
            return out + buffers_at(step, route(step.src, step.dst, rank))


def outermost(type: TensorType, rank: int, axes: tuple[str, ...], dims: tuple[int, ...]) -> bool:
    """Whether the blocks of the ranks along `axes` lie one after the other in a local tensor."""
    if type.mesh.position(rank) is None:
        return True
    return along(type.mesh, axes, type.local_shape(rank), dims).straight
