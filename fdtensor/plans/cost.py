"""`CostModel`: seconds of a step from its bytes, as data."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from fdtensor.layouts.errors import PlanError
from fdtensor.layouts.record import Record
from fdtensor.plans.collectives import Step, is_local
from fdtensor.plans.traffic import most_received

__all__ = ["GLOO", "NCCL", "CostModel", "in_order", "overlapped", "seconds"]


def _time(value: object) -> float:
    """Seconds, or how many times longer something takes."""
    return _number(value, 0.0)


def _rate(value: object) -> float:
    """So much per second."""
    return _number(value, 5e-324)


def _number(value: object, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _no_price(value)
    if not least <= value <= sys.float_info.max:
        raise _no_price(value)
    return float(value)


def _no_price(value: object) -> PlanError:
    return PlanError(
        f"{value!r} is no price.",
        hint="Times of a cost model are finite, 0 or more; rates are finite and more than 0.",
    )


def _table(*kinds: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns the converter of rows, each a name and its numbers, to tuples."""

    def convert(rows: Any) -> tuple[Any, ...]:
        try:
            return tuple(
                [(_name(n), *[k(v) for k, v in zip(kinds, vs, strict=True)]) for n, *vs in rows]
            )
        except (TypeError, ValueError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f"{rows!r} is no table of a cost model.",
                hint="Give rows of a name and its numbers: (('all_gather', 1.6),).",
            ) from None

    return convert


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise PlanError(f"{value!r} is no name in a cost model.", hint="Names are texts.")
    return value


@attrs.frozen(eq=False)
class CostModel(Record):
    """Seconds of a step from bytes, as data: `launch + messages * latency + bytes / bandwidth`.

    Raises `PlanError` for times under 0, rates of 0 or less, and what is not finite.

    >>> import attrs
    >>> slow = attrs.evolve(fd.cost.NCCL, name="slow", latency=0.5, launch=[])
    >>> mesh = Mesh(x=2)
    >>> p = plan(TensorType((4,), torch.int64, mesh.layout("x")), mesh.layout(), cost=slow)
    >>> round(p.seconds, 6), p.cost.name
    (0.5, 'slow')
    """

    name: str = attrs.field(converter=_name)
    latency: float = attrs.field(converter=_time)
    """Seconds for one more message."""
    bandwidth: float = attrs.field(converter=_rate)
    """Bytes per second into one rank."""
    copy: float = attrs.field(converter=_rate)
    """Bytes per second of a local copy, read and written."""
    flops: float = attrs.field(converter=_rate)
    """Floating-point operations per second of one rank."""
    launch: tuple[tuple[str, float], ...] = attrs.field(converter=_table(_time))
    """Seconds that a call takes by itself, by kind."""
    slowdown: tuple[tuple[str, float], ...] = attrs.field(converter=_table(_time))
    """How many times longer than `bandwidth` says, by kind; 1 where it is silent."""
    axes: tuple[tuple[str, float, float], ...] = attrs.field(
        default=(), converter=_table(_time, _rate)
    )
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
    flops=5e12,
    launch=(("", 10e-6),),
    slowdown=(("peer_to_peer", 1.3), ("exchange", 1.2)),
)
"""Eight accelerators with a fast link, where named collectives are best: the default of all."""

GLOO = CostModel(
    "gloo",
    latency=4e-4,
    bandwidth=0.6e9,
    copy=8e9,
    flops=3e10,
    launch=(
        ("", 1.4e-3),
        ("peer_to_peer", 4e-4),
        ("all_to_all", 5e-5),
        ("exchange", 5e-5),
        ("all_reduce", 8e-4),
        ("reduce_scatter", 3e-3),
    ),
    slowdown=(
        ("all_gather", 1.6),
        ("all_reduce", 1.35),
        ("reduce_scatter", 3.0),
        ("exchange", 1.5),
    ),
)
"""Processes of one machine that talk by gloo: small tensors go best by one all-to-all, large ones
by messages from rank to rank, a reduce_scatter never (gloo runs it as an all_reduce)."""


HIDDEN = 1 / 16
"""The part of a launch that is still felt when steps overlap and travel together."""


@functools.cache
def overlapped(cost: CostModel) -> CostModel:
    """The costs of a step amid a program: most launches and latencies pass behind other work.

    Collectives start early, and small ones of a kind travel together.
    """
    return _scaled(cost, HIDDEN)


def in_order(cost: CostModel) -> CostModel:
    """Prices with which a choice feels launches and latencies in full, and nothing else is work."""
    free = attrs.evolve(cost, copy=1e300, flops=1e300)
    return _scaled(free, 1 / HIDDEN)


def _scaled(cost: CostModel, by: float) -> CostModel:
    launch = tuple((kind, by * value) for kind, value in cost.launch)
    return attrs.evolve(cost, latency=by * cost.latency, launch=launch)


@functools.lru_cache(maxsize=16384)
def seconds(step: Step, cost: CostModel) -> float:
    """The seconds that `cost` gives for a step. Time: constant in the number of messages."""
    collective, moved = step.collective, most_received((step,))
    time = collective.copied(step, moved) / cost.copy
    if not is_local(step):
        kind = collective.kind
        latency, bandwidth = cost.link(collective.link())
        launch, slowdown = dict(cost.launch), dict(cost.slowdown)
        time += launch.get(kind, launch.get("", 0.0)) + collective.messages(step) * latency
        time += moved * slowdown.get(kind, 1.0) / bandwidth
    return time
