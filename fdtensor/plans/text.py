"""A plan as text: a title, a row for each step, the total."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdtensor.layouts.mesh import Mesh
from fdtensor.plans.traffic import most_received

if TYPE_CHECKING:
    from fdtensor.plans.planner import Plan

__all__ = ["as_text", "bytes_text", "listing", "time_text"]


def as_text(found: Plan) -> str:
    """The plan as aligned lines, as `print` shows it."""
    title, rows, total = listing(found)
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
    return "\n".join([title, *lines, total])


def listing(found: Plan) -> tuple[str, list[tuple[str, str, str]], str]:
    """The title, a row for each step, and the total, as texts."""
    here, there = found.src.mesh, found.dst.mesh
    title = f"{found.src} -> {found.dst} on {there!r}"
    if here is not there:
        title = f"{found.src} on {_short(here)} -> {found.dst} on {_short(there)}"
    rows = [
        (str(step.collective), str(step.dst), bytes_text(most_received((step,))))
        for step in found.steps
    ]
    count = len(rows)
    plural = "step" if count == 1 else "steps"
    return title, rows, f"{count} {plural}, {bytes_text(found.received_bytes)} received per rank"


def _short(mesh: Mesh) -> str:
    text = repr(mesh)
    if len(text) <= 60:
        return text
    return f"{mesh.size} ranks as {dict(zip(mesh.axes, mesh.sizes, strict=True))}"


def bytes_text(count: int) -> str:
    """A number of bytes."""
    return f"{count} B"


def time_text(value: float) -> str:
    """A time in seconds, with the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"
