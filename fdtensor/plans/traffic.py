"""Traffic: the bytes that ranks receive and send in the steps of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.opaque import opaque
from fdtensor.plans.collectives import Step, is_local
from fdtensor.plans.counts import Count, most

__all__ = [
    "all_received",
    "most_received",
    "most_sent",
    "received",
    "received_at",
    "sent",
    "sent_at",
]


def received(step: Step) -> Count:
    """The bytes each rank of `step.dst.mesh` receives, as an array that broadcasts over it."""
    return step.collective.received(step)


def received_at(step: Step, rank: int) -> int:
    """The bytes that `rank` receives, message by message."""
    outside = step.dst.mesh.position(rank) is None
    return 0 if outside else step.collective.received_at(step, rank)


def sent(step: Step) -> Count:
    """The bytes that each rank sends, as an array over the mesh of those that send."""
    return step.collective.sent(step)


def sent_at(step: Step, rank: int) -> int:
    """The bytes that `rank` sends, message by message."""
    outside = step.collective.senders(step).position(rank) is None
    return 0 if outside else step.collective.sent_at(step, rank)


def most_received(steps: Iterable[Step], times: Iterable[int] | None = None) -> int:
    """The bytes that the busiest rank receives in these steps, each taken once or `times`."""
    pairs = zip(steps, repeat(1) if times is None else times, strict=times is not None)
    return _busiest([(s.dst.mesh, received(s) * n) for s, n in pairs if not is_local(s)])


def most_sent(steps: Iterable[Step]) -> int:
    """The bytes that the rank that sends most sends in these steps."""
    return _busiest([(s.collective.senders(s), sent(s)) for s in steps if not is_local(s)])


def all_received(steps: Iterable[Step]) -> int:
    """The bytes that all ranks together receive in these steps."""
    return sum(step.collective.received_by_all(step) for step in steps)


@opaque
def _busiest(counts: Sequence[tuple[Mesh, Count]]) -> int:
    """The most that one rank has of counts that add up, each with its mesh."""
    if len({mesh for mesh, _ in counts}) <= 1:
        return most(sum([count for _, count in counts], start=np.zeros((), np.int64)))
    by_rank: Counter[int] = Counter()
    for mesh, count in counts:
        numbers: list[int] = np.ravel(np.broadcast_to(count, mesh.sizes)).tolist()
        for rank, n in zip(mesh.order, numbers, strict=True):
            by_rank[rank] += n
    return max(by_rank.values())
