"""`of_plan`: what the picture of a plan says: blocks around each step, bytes and bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fdtensor.inspect.pictures.facts import Description, Facts, Move, Note, Row, Section, Table
from fdtensor.inspect.pictures.panels import MOST_CELLS, blocks_of
from fdtensor.inspect.pictures.types import legend
from fdtensor.plans.collectives import Exchange, Step, is_local
from fdtensor.plans.collectives.rounds import piece
from fdtensor.plans.cost import CostModel, seconds
from fdtensor.plans.planner import Plan
from fdtensor.plans.routes import Message, route
from fdtensor.plans.text import bytes_text, listing, time_text
from fdtensor.plans.traffic import all_received, most_received

__all__ = ["of_plan"]

MOST_ROUNDS = 8
"""How many rounds of an exchange are listed."""


def of_plan(plan: Plan, cost: CostModel | None = None) -> Description:
    """The blocks before and after each step, with bytes of the busiest rank, the bound, the peak.

    Seconds are those of `cost`, by default of the model that the plan was made for.
    """
    cost = cost or plan.cost
    title, _, _ = listing(plan)
    tables = *_steps(plan, cost), *_rounds(plan)
    parts = _bytes(plan), _facts(plan, cost), *tables, *_stages(plan, cost)
    return Description(title, parts)


def _bytes(plan: Plan) -> Table:
    """The bytes that the busiest rank receives, beside the bound."""
    most, least = plan.received_bytes, plan.lower_bound_bytes
    reached = "reached" if most <= least else f"{bytes_text(most - least)} less"
    rows = (
        Row(("received", bytes_text(most), "by the busiest rank"), 1.0 if most else None),
        Row(("bound", bytes_text(least), reached), min(1.0, least / most) if most else None),
    )
    return Table(("", "", ""), rows, "<><", bars=True)


def _facts(plan: Plan, cost: CostModel) -> Facts:
    total, least = plan.total_bytes, plan.least_total_bytes
    reached = "reached" if total <= least else f"{bytes_text(total - least)} less"
    time = sum(seconds(step, cost) for step in plan.steps)
    return Facts(
        (
            ("in all", f"{bytes_text(total)} received; bound {bytes_text(least)}, {reached}"),
            ("sent", f"{bytes_text(plan.sent_bytes)} by the busiest rank"),
            ("peak", f"{bytes_text(plan.peak_bytes)} held at once by a rank"),
            ("time", f"{time_text(time)} by the cost model {cost.name!r}"),
        )
    )


def _steps(plan: Plan, cost: CostModel) -> Iterator[Section]:
    if not plan.steps:
        yield Note("nothing to do: the types are the same")
        return
    counts = [most_received((step,)) for step in plan.steps]
    total = sum(counts)
    rows = [
        Row(
            (
                str(i),
                str(step.collective),
                str(step.dst),
                bytes_text(count),
                time_text(seconds(step, cost)),
            ),
            count / total if total else None,
        )
        for i, (step, count) in enumerate(zip(plan.steps, counts, strict=True), 1)
    ]
    yield Table(("", "step", "gives", "received", "time"), tuple(rows), "><<>>")


def _rounds(plan: Plan) -> Iterator[Section]:
    """What the busiest rank receives in each round of the exchanges that have several."""
    for i, step in enumerate(plan.steps, 1):
        match step.collective:
            case Exchange(pieces=count) if count > 1:
                every = {r: route(step.moves, r).recvs for r in step.dst.mesh.ranks}
                rank = max(every, key=lambda r: sum(message.numel for message in every[r]))
                yield _table_of_rounds(i, rank, every[rank], count, step.dst.dtype.itemsize)


def _table_of_rounds(
    step: int, rank: int, messages: Sequence[Message], count: int, itemsize: int
) -> Table:
    rows = []
    for i in range(count):
        parts = [piece(message, i, count) for message in messages]
        received = sum(part.numel for part in parts) * itemsize
        senders = sum(part.numel > 0 for part in parts)
        share = received / (sum(message.numel for message in messages) * itemsize or 1)
        if i < MOST_ROUNDS - 1 or count <= MOST_ROUNDS:
            rows.append(Row((f"round {i + 1}", bytes_text(received), f"from {senders}"), share))
    if count > len(rows):
        rows.append(Row((f"... {count - len(rows)} more", "", "")))
    return Table((f"step {step}, rank {rank}", "received", "ranks"), tuple(rows), "<>>", bars=True)


def _stages(plan: Plan, cost: CostModel) -> Iterator[Section]:
    most = max(48, MOST_CELLS // (len(plan.steps) + 1))
    yield blocks_of(plan.src, f"before: {plan.src}", most=most)
    for i, step in enumerate(plan.steps, 1):
        yield Move(f"{i}. {step.collective}", _moved(step, cost))
        where = "after" if i == len(plan.steps) else f"after {i}"
        yield blocks_of(step.dst, f"{where}: {step.dst}", most=most)
    yield from legend(plan.src, *(step.dst for step in plan.steps))


def _moved(step: Step, cost: CostModel) -> str:
    if is_local(step):
        return f"nothing is sent, {time_text(seconds(step, cost))}"
    most, total = most_received((step,)), all_received((step,))
    return (
        f"{bytes_text(most)} received by the busiest rank, {bytes_text(total)} by all, "
        f"{time_text(seconds(step, cost))}"
    )
