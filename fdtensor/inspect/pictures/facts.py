"""The contents of a picture, without their look: panels of blocks, tables, lanes of a timeline.

Text and HTML are both made from these records, so that they tell the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

__all__ = [
    "Band",
    "Blocks",
    "Cell",
    "Description",
    "Facts",
    "Lane",
    "Move",
    "Note",
    "Panel",
    "Row",
    "Section",
    "Span",
    "Table",
    "Timeline",
    "owners",
]


@attrs.frozen
class Band:
    """Indices `start` to `stop` of a dim: a row or a column of a panel."""

    start: int
    stop: int
    name: str
    """The coordinates of the ranks that hold it: `dp=0`; empty where the dim is not cut."""
    left_out: int = 0
    """How many bands it stands for, which are not drawn; 0 for a band that is."""


@attrs.frozen
class Cell:
    """A block, or what a panel shows of it, and who holds it."""

    ranks: tuple[int, ...]
    label: str
    pending: bool
    """Whether each of the ranks holds a term of it only."""
    about: str
    """All of it as one sentence."""
    values: tuple[tuple[str, ...], ...] = ()

    @property
    def owner(self) -> int:
        """The rank that gives it its color: the first of its ranks."""
        return self.ranks[0]


@attrs.frozen
class Panel:
    """Two dims of a tensor, at fixed indices of the others; None for cells that nobody holds.

    `rows_of` and `cols_of` name the dims: empty where the tensor has none.
    """

    label: str
    """The indices of the other dims, or what else tells it from the panels beside it."""
    name: str
    """The coordinates of the ranks that hold these; empty where no axis cuts the other dims."""
    rows_of: str
    cols_of: str
    rows: tuple[Band, ...]
    cols: tuple[Band, ...]
    cells: tuple[tuple[Cell | None, ...], ...]


@attrs.frozen
class Blocks:
    """The blocks of a tensor, as rows of panels."""

    title: str
    panels: tuple[tuple[Panel, ...], ...]
    empty: str
    """The ranks that hold no element, as a sentence; empty where there are none."""
    notes: tuple[str, ...] = ()


@attrs.frozen
class Move:
    """The step between the blocks before it and those after it."""

    title: str
    detail: str


@attrs.frozen
class Facts:
    """Names with what is known of each."""

    rows: tuple[tuple[str, str], ...]


@attrs.frozen
class Row:
    """A row of a table; `share` of the whole, `marked` where it is one of the costliest."""

    cells: tuple[str, ...]
    share: float | None = None
    marked: bool = False


@attrs.frozen
class Table:
    """Rows of texts; `align` has "<" or ">" for each column."""

    head: tuple[str, ...]
    rows: tuple[Row, ...]
    align: str
    bars: bool = False
    """Whether the share of each row is drawn as a bar."""


@attrs.frozen
class Span:
    """The work of a lane from `start` to `stop`, in seconds."""

    start: float
    stop: float
    label: str
    about: str


@attrs.frozen
class Lane:
    """The work of compute or of the network in the course of time."""

    name: str
    spans: tuple[Span, ...]


@attrs.frozen
class Timeline:
    """Lanes side by side, from 0 to `stop` seconds."""

    lanes: tuple[Lane, ...]
    stop: float
    ends: str
    """The time at its end, as text."""


@attrs.frozen
class Note:
    """A sentence."""

    text: str


Section = Facts | Blocks | Move | Table | Timeline | Note
"""A part of a picture."""


@attrs.frozen
class Description:
    """A picture as data: what it shows, in order."""

    title: str
    sections: tuple[Section, ...]


def owners(sections: Sequence[Section]) -> dict[int, float]:
    """The color of each owner of a block: 0 to 1, in the order of the ranks."""
    ranks = {
        cell.owner
        for section in sections
        if isinstance(section, Blocks)
        for row in section.panels
        for panel in row
        for cells in panel.cells
        for cell in cells
        if cell is not None
    }
    last = max(1, len(ranks) - 1)
    return {rank: i / last for i, rank in enumerate(sorted(ranks))}
