"""A plan within a budget: the same exchanges in as many pieces as it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from fdtensor.layouts.errors import PlanError
from fdtensor.layouts.mesh import Mesh
from fdtensor.plans.collectives import by_exchange, is_local

if TYPE_CHECKING:
    from fdtensor.plans.planner import Plan

__all__ = ["in_pieces", "some_ranks", "within"]


def within(found: Plan, max_bytes: int, other: int) -> Plan:
    """The plan itself, or the same steps as exchanges in as many pieces as the budget asks for.

    Raises `PlanError`, which tells the least budget: this one's, or the peak of the `other` plan.
    """
    if found.peak_bytes <= max_bytes:
        return found
    longest, pieces = max([1, *found.src.shape]), 1
    # cut once, what was contiguous may need a buffer; beyond that more pieces never hold more
    least = min(p.peak_bytes for p in (found, in_pieces(found, 1), in_pieces(found, longest)))
    while least <= max_bytes:
        cut = in_pieces(found, pieces)
        if cut.peak_bytes <= max_bytes:
            return cut
        pieces = min(2 * pieces, longest)
    least = min(least, other)
    raise PlanError(
        f"no plan fits in {max_bytes} bytes per rank: the least is {least}.",
        src=found.src,
        dst=found.dst,
        source=f"{max(found.src.local_nbytes(r) for r in some_ranks(found.src.mesh))} bytes",
        destination=f"{max(found.dst.local_nbytes(r) for r in some_ranks(found.dst.mesh))} bytes",
        hint=f"Pass max_bytes={least} or more, or choose layouts with smaller blocks.",
    )


def in_pieces(found: Plan, pieces: int) -> Plan:
    """The plan by exchanges of so many rounds."""
    steps = [s if is_local(s) else by_exchange(s.src, s.dst, pieces=pieces) for s in found.steps]
    return attrs.evolve(found, steps=tuple(steps))


def some_ranks(mesh: Mesh) -> Sequence[int]:
    """All ranks of a mesh, or of a large one those at the ends of its axes, who hold the most."""
    if mesh.size <= 1024:
        return mesh.ranks
    corners = [sorted({0, 1 % n, n // 2, n - 1}) for n in mesh.sizes]
    coords: list[tuple[int, ...]] = [()]
    for indices in corners:
        coords = [(*c, i) for c in coords for i in indices][:4096]
    return [mesh.rank_at(c) for c in coords]
