"""`plan_explained`: the ways from one type to another that the planner compares, as text."""

from __future__ import annotations

from fdtensor.inspect.explanation.tables import columns, microseconds
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.cost import CostModel
from fdtensor.plans.planner import Plan, plan
from fdtensor.plans.search import candidates
from fdtensor.plans.text import bytes_text

__all__ = ["plan_explained"]


def plan_explained(src: TensorType, dst: TensorType | Layout, cost: CostModel | None) -> str:
    """The plan taken, the others compared with it, and the bytes that none can be below.

    Last comes the way over full copies, which is not compared: what it would cost.
    """
    best = plan(src, dst, cost=cost)
    ways = [
        Plan(best.src, best.dst, s, best.cost) for s in candidates(best.src, best.dst, best.cost)
    ]
    others = [way for way in dict.fromkeys(ways) if way is not best]
    others.sort(key=lambda way: (way.total_bytes, way.seconds, len(way.steps)))
    rows = [("", "received", "all ranks", "time", ""), *_rows("taken", best)]
    for other in others:
        rows += _rows("other", other)
    over = _over_copies(best)
    if over is not None and over not in (best, *others):
        rows += _rows("full copies", over)
    title = f"{best.src} -> {best.dst} on {best.dst.mesh!r}"
    return "\n".join([title, *columns(rows, "<>>><"), *_why(best, others)])


def _rows(name: str, way: Plan) -> list[tuple[str, ...]]:
    """A plan with its figures beside its first step, the other steps below."""
    steps = [str(step.collective) for step in way.steps] or ["nothing to do"]
    figures = bytes_text(way.received_bytes), bytes_text(way.total_bytes), microseconds(way.seconds)
    return [(name, *figures, steps[0]), *(("", "", "", "", step) for step in steps[1:])]


def _over_copies(best: Plan) -> Plan | None:
    """The way over a full copy on every rank; None between meshes."""
    mesh = best.src.mesh
    if mesh is not best.dst.mesh:
        return None
    copies = best.src.with_layout(Layout(mesh, [Replicate()] * mesh.ndim))
    first, then = (plan(a, b, cost=best.cost) for a, b in ((best.src, copies), (copies, best.dst)))
    return Plan(best.src, best.dst, (*first.steps, *then.steps), best.cost)


def _why(best: Plan, others: list[Plan]) -> list[str]:
    """The bound, whether the plan reaches it, and why the plan was taken."""
    bound, received = best.lower_bound_bytes, best.received_bytes
    if received == 0:
        return ["nothing is sent: every rank has what it wants, or can make it"]
    law = "a rank must receive what it wants and does not hold"
    if best.src.layout.partial:
        law = "n pending terms that k ranks want as one take n + k - 1 transfers"
    reached = (
        "reached" if received == bound else f"{bytes_text(received - bound)} less than received"
    )
    lines = [f"bound {bytes_text(bound)}, {reached}: {law}"]
    if others:
        same = [way for way in others if way.total_bytes == best.total_bytes]
        reason = "the least time among the fewest bytes" if same else "the fewest bytes"
        lines.append(f"taken for {reason} of all ranks")
    return lines
