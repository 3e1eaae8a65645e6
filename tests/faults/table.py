"""Cells as a table, phases by faults: seconds until all living ranks had an error; its texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.faults.cell import Cell

__all__ = ["printed", "table"]


def printed(cell: Cell) -> str:
    """The phase, the fault, the seconds, the errors and whether ranks can go on."""
    usable = " / ".join(cell.usable)
    return f"| {cell.phase} | {cell.fault} | {cell.seconds:.1f} | {_says(cell)} | {usable} |"


def table(cells: Sequence[Cell]) -> str:
    """All cells; a number says more below, an example of each fault follows."""
    faults, phases = (list(dict.fromkeys(names)) for names in zip(*map(_key, cells), strict=True))
    known = {_key(cell): cell for cell in cells}
    notes: list[str] = []
    rows = [["phase", *faults], ["---"] * (len(faults) + 1)]
    for phase in phases:
        row = [phase]
        for fault in faults:
            cell = known.get((fault, phase))
            text = "" if cell is None else _short(cell)
            if cell is not None and not _is_plain(cell):
                notes.append(f"{len(notes) + 1}. {phase}, {fault}: {_says(cell)} (usable: "
                             f"{' / '.join(cell.usable)})")  # fmt: skip
                text += f" ({len(notes)})"
            row.append(text)
        rows.append(row)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *notes, "", *_examples(cells, faults)])


def _key(cell: Cell) -> tuple[str, str]:
    return cell.fault, cell.phase


def _short(cell: Cell) -> str:
    if cell.hangs:
        return "HANGS"
    return f"{cell.seconds:.1f}" if cell.errors else "-"


def _is_plain(cell: Cell) -> bool:
    """Whether all ranks had one error and went on after it, or none and no need."""
    alike = len({error.partition("\n")[0] for error in cell.errors}) == len(_expected(cell))
    return (
        alike
        and not (cell.hangs or cell.silent)
        and set(cell.usable) <= {"yes", "apart", "no group"}
    )


def _expected(cell: Cell) -> Iterable[int]:
    """As many entries as there are to be errors."""
    if cell.fault == "partition":
        return range(2)
    return range(0 if cell.fault == "slow" else 1)


def _says(cell: Cell) -> str:
    sentences = dict.fromkeys(error.partition("\n")[0] for error in cell.errors)
    says = " / ".join(sentences) or "no error"
    if cell.hangs:
        return f"HANGS; {says}"
    return f"SILENT on some; {says}" if cell.silent else says


def _examples(cells: Sequence[Cell], faults: Iterable[str]) -> list[str]:
    """For each fault what it is told by, in the phase in the middle of those that have it."""
    lines = []
    for fault in faults:
        own = [cell for cell in cells if cell.fault == fault and _is_plain(cell)]
        if own:
            cell = own[len(own) // 2]
            lines.append(f"- {fault} ({cell.phase}): {_says(cell)}")
    return lines
