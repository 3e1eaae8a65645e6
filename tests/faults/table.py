"""A cell as a line of a table."""

from __future__ import annotations

from tests.faults.cell import Cell

__all__ = ["printed"]


def printed(cell: Cell) -> str:
    """The phase, the fault, the seconds, the errors and whether ranks can go on."""
    sentences = dict.fromkeys(error.partition("\n")[0] for error in cell.errors)
    says = " / ".join(sentences) or "no error"
    if cell.hangs:
        says = f"HANGS; {says}"
    elif cell.silent:
        says = f"SILENT on some; {says}"
    usable = " / ".join(cell.usable)
    return f"| {cell.phase} | {cell.fault} | {cell.seconds:.1f} | {says} | {usable} |"
