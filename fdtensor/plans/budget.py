"""A plan within a budget: the same exchanges in as many pieces as it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from fdtensor.layouts.errors import PlanError
from fdtensor.layouts.mesh import Mesh
from fdtensor.plans.collectives import by_exchange, is_local
from fdtensor.plans.meetings import MAX_RANKS

if TYPE_CHECKING:
    from fdtensor.plans.planner import Plan

__all__ = ["in_pieces", "some_ranks", "within"]


def within(plan: Plan, max_bytes: int, other: int) -> Plan:
    """The plan itself, or the same steps as exchanges in as many pieces as the budget asks for.

    Raises `PlanError`, which tells the least budget: this one's, or the peak of the `other` plan.
    """
    if plan.peak_bytes <= max_bytes:
        return plan
    longest, pieces = max([1, *plan.src.shape]), 1
    # cut once, what was contiguous may need a buffer; beyond that more pieces never hold more
    least = min(p.peak_bytes for p in (plan, in_pieces(plan, 1), in_pieces(plan, longest)))
    while least <= max_bytes:
        cut = in_pieces(plan, pieces)
        if cut.peak_bytes <= max_bytes:
            return cut
        pieces = min(2 * pieces, longest)
    least = min(least, other)
    raise PlanError(
        f"no plan fits in {max_bytes} bytes per rank: the least is {least}.",
        src=plan.src,
        dst=plan.dst,
        source=f"{max(plan.src.local_nbytes(r) for r in some_ranks(plan.src.mesh))} bytes",
        destination=f"{max(plan.dst.local_nbytes(r) for r in some_ranks(plan.dst.mesh))} bytes",
        hint=f"Pass max_bytes={least} or more, or choose layouts with smaller blocks.",
    )


def in_pieces(plan: Plan, pieces: int) -> Plan:
    """The plan by exchanges of so many rounds."""
    steps = [s if is_local(s) else by_exchange(s.src, s.dst, pieces=pieces) for s in plan.steps]
    return attrs.evolve(plan, steps=tuple(steps))


def some_ranks(mesh: Mesh) -> Sequence[int]:
    """All ranks of a mesh, or of a large one those at the ends of its axes, who hold the most."""
    if mesh.size <= MAX_RANKS:
        return mesh.ranks
    corners = [sorted({0, 1 % n, n // 2, n - 1}) for n in mesh.sizes]
    coords: list[tuple[int, ...]] = [()]
    for indices in corners:
        coords = [(*c, i) for c in coords for i in indices][:4096]
    return [mesh.rank_at(c) for c in coords]
