"""What the bench of computing shows in the terminal: tables of ops, steps and traces."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from tests.bench.compute_checks import CheckTimes
from tests.bench.compute_ops import OpTimes, Three
from tests.bench.compute_steps import StepTimes
from tests.bench.compute_trace import TraceTimes
from tests.bench.tables import grouped

__all__ = ["checks_table", "ops_table", "steps_table", "traces_table"]


def ops_table(rows: Sequence[OpTimes]) -> Table:
    """Microseconds of an op: plain torch, `call`, DTensor; below 1 `call` is the slower one."""
    three = ["plain", "call", "DTensor", "DT/call"]
    table = grouped(
        "us of an op, blocks of 8x8, collectives free, medians: forward | forward + backward | "
        "first call | first with backward",
        ["op"],
        [*three, "| plain", *three[1:]],
        [],
        ["| call", "DTensor"] * 2,
        [],
        ["collectives"],
    )
    for row in rows:
        table.add_row(
            row.op,
            *_three(row.forward),
            *_three(row.both),
            *_three(row.first)[1:3],
            *_three(row.first_both)[1:3],
            "{} / {}".format(*row.collectives),
        )
    return table


def steps_table(rows: Sequence[StepTimes]) -> Table:
    """Microseconds of a training step in each way, and of its first one."""
    table = grouped(
        "us of a training step, forward + backward, tensor parallel over 4, collectives free",
        ["model", "way"],
        ["step", "to local", "first step", "ops", "collectives"],
    )
    model = None
    for row in rows:
        if model is not None and row.model != model:
            table.add_section()
        model = row.model
        table.add_row(
            row.model,
            row.way,
            f"{row.us:,.1f}",
            f"{row.to_local:.2f}",
            f"{row.first_us:,.0f}",
            *(f"{n:,}" if row.ops else "-" for n in (row.ops, row.collectives)),
        )
    return table


def traces_table(rows: Sequence[TraceTimes]) -> Table:
    """Seconds to trace a training step."""
    table = grouped(
        "s to trace a step of a GPT with AdamW",
        ["mesh"],
        ["layers", "calls", "lines", "collectives", "record", "choose", "write", "trace again"],
    )
    for row in rows:
        table.add_row(
            row.mesh,
            *(f"{n:,}" for n in (row.layers, row.calls, row.eqns, row.collectives)),
            *(f"{s:.2f}" for s in (row.record_s, row.choose_s, row.write_s, row.again_s)),
        )
    return table


def checks_table(rows: Sequence[CheckTimes]) -> Table:
    """Microseconds of lookups without a look at their indices, and with it."""
    table = grouped(
        "us of a lookup with 512 rows of indices a rank, collectives free",
        ["op"],
        ["plain", "unchecked", "checked", "ratio"],
        ["collectives"],
    )
    for row in rows:
        times = (f"{us:,.1f}" for us in (row.plain, row.unchecked, row.checked))
        counts = "{} / {}".format(*row.collectives)
        table.add_row(row.op, *times, f"{row.ratio:.2f}", counts)
    return table


def _three(times: Three | None) -> tuple[str, ...]:
    if times is None:
        return ("-",) * 4
    found = [f"{us:,.1f}" if us < 100 else f"{us:,.0f}" for us in _us(times)]
    return (*found, f"{times.dtensor_to_call:.2f}")


def _us(times: Three) -> tuple[float, float, float]:
    return times.plain, times.call, times.dtensor
