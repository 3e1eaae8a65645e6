"""`CostModel`: seconds of a step from its bytes, as data."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod

import attrs

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
    Step,
    is_local,
)
from fdtensor.exchange import route
from fdtensor.memory import copied
from fdtensor.record import Record
from fdtensor.traffic import received

__all__ = ["GLOO", "NCCL", "CostModel", "seconds"]


@attrs.frozen(eq=False)
class CostModel(Record):
    """Seconds of a step from bytes, as data: `launch + messages * latency + bytes / bandwidth`."""

    name: str
    latency: float
    """Seconds for one more message."""
    bandwidth: float
    """Bytes per second into one rank."""
    copy: float
    """Bytes per second of a local copy, read and written."""
    launch: tuple[tuple[str, float], ...]
    """Seconds that a call takes by itself, by kind."""
    slowdown: tuple[tuple[str, float], ...]
    """How many times longer than `bandwidth` says, by kind; 1 where it is silent."""
    axes: tuple[tuple[str, float, float], ...] = ()
    """Axes with a latency and bandwidth of their own."""

    def link(self, axes: Sequence[str] | None) -> tuple[float, float]:
        """The latency and bandwidth of the slowest of `axes`."""
        own = {axis: (latency, bandwidth) for axis, latency, bandwidth in self.axes}
        links = [own[axis] for axis in axes or own if axis in own]
        plain = [(self.latency, self.bandwidth)] if not axes or len(links) < len(axes) else []
        return max(a for a, _ in links + plain), min(b for _, b in links + plain)


NCCL = CostModel(
    "nccl",
    latency=4e-6,
    bandwidth=40e9,
    copy=1e12,
    launch=(("", 10e-6),),
    slowdown=(("peer_to_peer", 1.3), ("exchange", 1.2)),
)
"""Eight accelerators with a fast link, where named collectives are best."""

GLOO = CostModel(
    "gloo",
    latency=20e-6,
    bandwidth=0.7e9,
    copy=8e9,
    launch=(("", 150e-6), ("peer_to_peer", 60e-6)),
    slowdown=(("all_gather", 1.5), ("reduce_scatter", 4.0), ("exchange", 2.5), ("all_reduce", 1.3)),
)
"""Processes of one machine that talk by gloo, where messages from rank to rank are best."""


@functools.lru_cache(maxsize=16384)
def seconds(step: Step, cost: CostModel) -> float:
    """The seconds that `cost` gives for a step."""
    kind, axes, messages = _kind(step)
    moved = int(received(step).max(initial=0))
    latency, bandwidth = cost.link(axes)
    slowdown = dict(cost.slowdown).get(kind, 1.0)
    launch = dict(cost.launch)
    time = copied(step) / cost.copy
    if not is_local(step):
        time += launch.get(kind, launch.get("", 0.0))
        time += messages * latency + moved * slowdown / bandwidth
    return time


def _kind(step: Step) -> tuple[str, tuple[str, ...] | None, int]:
    """The kind of a step, its axes and how many messages a rank waits for."""
    mesh, collective = step.src.mesh, step.collective

    def peers(axes: Sequence[str]) -> int:
        return prod(mesh.axis_size(axis) for axis in axes) - 1

    match collective:
        case Slice(axes) | Mask(axes) | Pad(axes) | Scale(axes):
            return "local", axes, 0
        case AllGather(axes):
            return "all_gather", axes, peers(axes)
        case AllToAll(axes):
            return "all_to_all", axes, peers(axes)
        case AllReduce(axes):
            return "all_reduce", axes, 2 * peers(axes)
        case ReduceScatter(axes):
            return "reduce_scatter", axes, peers(axes)
        case Broadcast():
            return "broadcast", None, 1
        case Exchange(None, _, way, pieces):
            count = len(route(step.src, step.dst, step.dst.mesh.order[-1]).recvs)
            everyone = len({*step.src.mesh.order, *step.dst.mesh.order}) - 1
            whole_way = way == "all_to_all"
            return (
                ("exchange" if whole_way else way),
                None,
                pieces * (everyone if whole_way else count),
            )
        case Exchange(axes, _, way, pieces):
            assert axes is not None
            if way == "all_to_all":
                return "exchange", axes, peers(axes) * pieces
            some = mesh.order[-1]
            return way, axes, len(route(step.src, step.dst, some).recvs) * pieces
