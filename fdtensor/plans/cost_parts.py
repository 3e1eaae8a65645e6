"""`overlapped`, `in_order`, `parted`: models of a part of what a cost model says."""

from __future__ import annotations

import functools

import attrs

from fdtensor.plans.cost import CostModel

__all__ = ["HIDDEN", "in_order", "overlapped", "parted"]

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
    free = attrs.evolve(cost, copy=_NO_TIME, flops=_NO_TIME)
    return _scaled(free, 1 / HIDDEN)


@functools.cache
def parted(cost: CostModel) -> tuple[CostModel, CostModel]:
    """Models of what a step takes whatever its bytes are, and of what it takes for these alone."""
    axes = tuple((axis, latency, _NO_TIME) for axis, latency, _ in cost.axes)
    launches = attrs.evolve(cost, copy=_NO_TIME, bandwidth=_NO_TIME, axes=axes)
    return launches, _scaled(cost, 0.0)


_NO_TIME = 1e300
"""A rate at which nothing takes time."""


def _scaled(cost: CostModel, by: float) -> CostModel:
    launch = tuple((kind, by * value) for kind, value in cost.launch)
    axes = tuple((axis, by * latency, bandwidth) for axis, latency, bandwidth in cost.axes)
    return attrs.evolve(cost, latency=by * cost.latency, launch=launch, axes=axes)
