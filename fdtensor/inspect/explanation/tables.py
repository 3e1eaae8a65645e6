"""Texts of explanations: aligned columns, microseconds, and rows of placements."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby

from fdtensor.programs.choices import Body
from fdtensor.programs.nodes import Option

__all__ = ["columns", "counted", "microseconds", "row_text"]


def columns(rows: Sequence[Sequence[str]], align: str, indent: int = 2) -> list[str]:
    """Rows as aligned lines; `align` has "<" or ">" for each column."""
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(align))]
    lines = []
    for row in rows:
        cells = [
            f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        ]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return lines


def microseconds(value: float, sign: str = "") -> str:
    """Seconds as microseconds, so that a column of them lines up."""
    return f"{value * 1e6:{sign},.2f} us"


def counted(count: int, word: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count} {word}" + "s" * (count != 1)


def row_text(option: Option) -> str:
    """An option as its row: `S(1) S(0) -> P(sum)`; long runs of a placement are counted."""
    if not option.ins:
        return f"-> {_run(option.outs)}"
    by = " by decomposition" if isinstance(option.note, Body) else ""
    return f"{_run(option.ins)} -> {_run(option.outs)}{by}"


def _run(placements: Sequence[Hashable]) -> str:
    parts = []
    for placement, same in groupby(placements):
        count = len(list(same))
        text = "any" if placement == "free" else str(placement)
        parts.append(" ".join([text] * count) if count < 4 else f"{count} x {text}")
    return " ".join(parts)
