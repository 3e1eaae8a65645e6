"""A plan as text: a title, a row for each step, the total."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from fdtensor.layouts.mesh import Mesh
from fdtensor.plans.traffic import most_received

if TYPE_CHECKING:
    from fdtensor.plans.planner import Plan

__all__ = ["as_text", "bytes_text", "exact_bytes", "listing", "time_text"]

_exact = ContextVar("exact bytes", default=False)


def as_text(plan: Plan) -> str:
    """The plan as aligned lines, as `print` shows it."""
    title, rows, total = listing(plan)
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
    return "\n".join([title, *lines, total])


def listing(plan: Plan) -> tuple[str, list[tuple[str, str, str]], str]:
    """The title, a row for each step, and the total, as texts."""
    meshes = plan.src.mesh, plan.dst.mesh
    title = f"{plan.src} -> {plan.dst} on {plan.dst.mesh!r}"
    if meshes[0] is not meshes[1]:
        title = f"{plan.src} on {_short(meshes[0])} -> {plan.dst} on {_short(meshes[1])}"
    rows = [
        (str(step.collective), str(step.dst), bytes_text(most_received((step,))))
        for step in plan.steps
    ]
    count = len(rows)
    plural = "step" if count == 1 else "steps"
    return title, rows, f"{count} {plural}, {bytes_text(plan.received_bytes)} received per rank"


def _short(mesh: Mesh) -> str:
    text = repr(mesh)
    if len(text) <= 60:
        return text
    return f"{mesh.size} ranks as {dict(zip(mesh.axes, mesh.sizes, strict=True))}"


def bytes_text(count: int) -> str:
    """A number of bytes: exact below 10,000 and within `exact_bytes`, else to three digits."""
    if count < 10_000 or _exact.get():
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        size /= 1024
        if size < 999.5:
            return f"{size:.3g} {unit}"
    return f"{size:.0f} EiB"


@contextlib.contextmanager
def exact_bytes() -> Generator[None]:
    """Prints bytes exactly within: `50331648 B` for `48 MiB`.

    Plans, programs, explanations and pictures print what is 10,000 bytes or more to three digits;
    their properties (`plan.received_bytes`) are exact always.

    >>> mesh = Mesh(x=2)
    >>> p = plan(TensorType((4096, 64), torch.float32, mesh.layout("x")), mesh.layout())
    >>> print(p)
    f32[4096@x,64] -> f32[4096,64] on Mesh(x=2)
      all_gather[axis=x dim=0]  f32[4096,64]  512 KiB
    1 step, 512 KiB received per rank
    >>> with fd.plans.exact_bytes():
    ...     print(p)
    f32[4096@x,64] -> f32[4096,64] on Mesh(x=2)
      all_gather[axis=x dim=0]  f32[4096,64]  524288 B
    1 step, 524288 B received per rank
    """
    token = _exact.set(True)
    try:
        yield
    finally:
        _exact.reset(token)


def time_text(value: float) -> str:
    """A time in seconds, with the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"
