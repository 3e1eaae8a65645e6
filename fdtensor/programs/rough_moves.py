"""`about_seconds`: about the seconds of moves of values, from the bytes that a rank lacks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from fdtensor.layouts.placement import Cut, Partial, Placement
from fdtensor.layouts.remembered import remembered
from fdtensor.ops.graph import Full
from fdtensor.plans.cost import LOCAL, CostModel
from fdtensor.plans.cost_parts import overlapped
from fdtensor.programs.nodes import Place, Placements

__all__ = ["Ends", "about_seconds", "about_seconds_along", "fastest"]

Floats = npt.NDArray[np.float64]


def about_seconds(
    full: Full, sizes: Sequence[int], src: Placements, dst: Sequence[Place], cost: CostModel
) -> float:
    """About the least seconds that moving a value takes, from the bytes that a rank lacks.

    Terms are added by their owners, who then send the result; else a rank receives what it wants
    but for the part that it holds. It is a hundred times as fast to ask as `move_seconds`.
    """
    part = _moved(tuple(sizes), src, tuple(dst))
    if not part:
        return 0.0
    launch, bandwidth = fastest(cost)
    return part * full.nbytes / bandwidth + launch


@remembered(1 << 15)
def _moved(sizes: tuple[int, ...], src: Placements, dst: tuple[Place, ...]) -> float:
    each = [(1, 1, 1, 1), *map(_factors, sizes, src, dst)]
    return float(_received(*map(prod, zip(*each, strict=True))))


def about_seconds_along(
    full: Full, sizes: Sequence[int], along: Sequence[Sequence[Ends]], cost: CostModel
) -> Floats:
    """`about_seconds` of all combinations of ends along each axis: an array with a dim for each."""
    axes = [np.array([_factors(n, *ends) for ends in e]) for n, e in zip(sizes, along, strict=True)]
    grids: Sequence[Any] = np.meshgrid(
        *[np.arange(len(e)) for e in along], indexing="ij", sparse=True
    )
    factors = functools.reduce(np.multiply, [f[k] for f, k in zip(axes, grids, strict=True)])
    part = _received(*np.moveaxis(factors, -1, 0))
    launch, bandwidth = fastest(cost)
    seconds: Floats = np.where(part == 0, 0.0, part * full.nbytes / bandwidth + launch)
    return seconds


Ends = tuple[Any, Any]
"""The placement that a value has along an axis, and the one that is wanted."""


def _received(before: Any, after: Any, pending: Any, elsewhere: Any) -> Floats:
    """About the least bytes that a rank receives for each byte of a value, by `_factors`."""
    terms: Floats = (1 - 1 / pending) / before + np.maximum(0.0, 1 / after - 1 / (before * pending))
    lacking: Floats = (1 - 1 / elsewhere) / after
    return np.where(pending > 1, terms, lacking)


def _factors(n: int, p: Placement, q: Place) -> tuple[int, int, int, int]:
    """What an axis of n ranks does to a move from `p` to `q`.

    Into how many parts it cuts the value before and after, how many terms it adds, and on how many
    ranks lies what one wants.
    """
    wanted = p if q == "free" else q
    # what nobody wants of a whole is sliced away before terms are added
    sliced = isinstance(wanted, Cut) and not isinstance(p, Partial)
    before = n if isinstance(p, Cut) or sliced else 1
    after = n if isinstance(wanted, Cut) else 1
    if p == wanted:
        return before, after, 1, 1
    return before, after, n if isinstance(p, Partial) else 1, n if isinstance(p, Cut) else 1


@remembered(64)
def fastest(cost: CostModel) -> tuple[float, float]:
    """The seconds of the cheapest message without bytes, and the most bytes in a second."""
    visible = overlapped(cost)
    latency = min([visible.latency, *(seconds for _, seconds, _ in visible.axes)])
    launch = min((seconds for kind, seconds in visible.launch if kind != LOCAL), default=0.0)
    bandwidth = max([cost.bandwidth, *(rate for _, _, rate in cost.axes)])
    least = min([1.0, *(times for _, times in cost.slowdown)])
    return latency + launch, bandwidth / least if least else math.inf
