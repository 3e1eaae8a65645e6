"""What a bench shows in the terminal: tables of traffic, planning, a large mesh, overhead."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from rich.table import Table

from tests.bench.overhead import Overhead
from tests.bench.planning import Million, Planned, Times
from tests.bench.traffic import Traffic

__all__ = ["grouped", "million_table", "overhead_table", "planning_table", "traffic_table"]


def traffic_table(rows: Sequence[Traffic]) -> Table:
    """Milliseconds, ratios and bytes of the busiest rank; above 1 the first is the slower one."""
    table = grouped(
        "4 gloo processes: ms, medians; bytes that the busiest rank received",
        ["case", "KB"],
        ["fdtensor", "DTensor", "by hand"],
        ["best by hand"],
        ["fdtensor/hand", "DTensor/fdtensor"],
        ["fdtensor B", "DTensor B", "hand B", "bound B", "equal"],
    )
    shape = None
    for row in rows:
        kilobytes = prod(row.shape) * 4 / 1024
        if shape is not None and kilobytes < shape / 2:
            table.add_section()
        shape = kilobytes
        table.add_row(
            row.case,
            f"{kilobytes:.0f}",
            *(f"{ms:.2f}" for ms in (row.fdtensor_ms, row.dtensor_ms, row.hand_ms)),
            row.hand,
            f"{row.fdtensor_to_hand:.2f}",
            f"{row.dtensor_to_fdtensor:.2f}",
            *(
                f"{n:,}"
                for n in (row.fdtensor_bytes, row.dtensor_bytes, row.hand_bytes, row.bound_bytes)
            ),
            "yes" if row.equal else "[red]NO[/red]",
        )
    return table


def planning_table(rows: Sequence[Planned]) -> Table:
    """Milliseconds to plan without caches, median and worst, and microseconds to look up."""
    table = grouped(
        "planning, axes of size 2: ms uncached, median / worst; us when asked again",
        ["axes", "dims"],
        ["fdtensor", "DTensor greedy", "DTensor graph"],
        [],
        ["fdtensor again, us", "DTensor again, us"],
    )
    for row in rows:
        table.add_row(
            str(row.axes),
            str(row.dims),
            _times(row.fdtensor),
            _times(row.greedy),
            _times(row.graph),
            f"{row.cached_us:.2f}",
            f"{row.greedy_cached_us:.2f}",
        )
    return table


def million_table(rows: Sequence[Million]) -> Table:
    """Milliseconds to plan for a million ranks and to find what one of them sends and receives."""
    table = grouped(
        "planning for 1,048,576 ranks, dp=16, pp=64, tp=1024: ms uncached",
        ["from", "to"],
        ["plan", "one rank's messages", "how many"],
    )
    for row in rows:
        table.add_row(
            row.src, row.dst, f"{row.plan_ms:.2f}", f"{row.route_ms:.2f}", str(row.messages)
        )
    return table


def overhead_table(rows: Sequence[Overhead]) -> Table:
    """Microseconds of a call whose collectives are free."""
    table = grouped(
        "us a call, collectives free, planned before",
        ["case", "cost"],
        ["bare collectives", "fdtensor", "above bare", "DTensor"],
        ["plan"],
    )
    for row in rows:
        table.add_row(
            row.case,
            row.cost,
            *(f"{us:.1f}" for us in (row.bare_us, row.fdtensor_us, row.above_us, row.dtensor_us)),
            ", ".join(text.partition("[")[0] for text in row.plan) or "-",
        )
    return table


def grouped(title: str, *groups: Sequence[str]) -> Table:
    """A table whose columns come in groups: texts and numbers in turns."""
    table = Table(title=title, title_justify="left")
    for i, group in enumerate(groups):
        for name in group:
            table.add_column(name, justify="right" if i % 2 else "left", no_wrap=True)
    return table


def _times(times: Times | None) -> str:
    return "-" if times is None else f"{_ms(times.median_ms)} / {_ms(times.worst_ms)}"


def _ms(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:,.0f}"
