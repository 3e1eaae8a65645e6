"""`blocks_of`: the blocks of a type as panels; long dims, and many panels, with a gap inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import TypeVar

from fdtensor.inspect.pictures.facts import Band, Blocks, Cell, Panel
from fdtensor.inspect.pictures.holders import (
    Dim,
    Run,
    dims_of,
    empty_ranks,
    name_of,
    ranks_text,
    short,
)
from fdtensor.layouts.mesh import Coord
from fdtensor.layouts.tensor_type import TensorType

__all__ = ["MOST_CELLS", "Values", "blocks_of", "value_texts"]

Values = Callable[[Sequence[int], Sequence[Run]], tuple[tuple[str, ...], ...]]
"""The elements that ranks hold at a run of each dim, as rows of texts."""

MOST_CELLS, MOST_BANDS, COLUMNS = 400, 16, 84
"""How many blocks are drawn, how many along one dim, and in how many characters."""

T = TypeVar("T")


def blocks_of(
    type: TensorType,
    title: str,
    *,
    named: bool = False,
    values: Values | None = None,
    term: tuple[str, Coord] | None = None,
    most: int = MOST_CELLS,
) -> Blocks:
    """The blocks of a type, at most so many; of one pending term only where `term` is given.

    With `named`, dims are those of a mesh: their coordinates are told, not their indices. With
    `values`, dims before the last two are drawn index by index.
    """
    return _Drawing(type, named, values, term).blocks(title, most)


class _Drawing:
    """A type, and what is to be drawn of it."""

    def __init__(
        self,
        type: TensorType,
        named: bool,
        values: Values | None,
        term: tuple[str, Coord] | None,
    ) -> None:
        self.type, self.named, self.values, self.term = type, named, values, term
        self.fixed = dict(zip(type.layout.partial, term[1], strict=True)) if term else {}
        self.pending = bool(type.layout.partial)
        self.dims = dims_of(type)
        self.ranks: dict[tuple[tuple[Coord, ...], ...], tuple[int, ...]] = {}

    def blocks(self, title: str, most_cells: int) -> Blocks:
        lead, (rows, cols) = self._lines()
        wide = lead[-1:]
        deep = [list(runs) for runs in product(*lead[:-1])]
        across = [[run] for run in wide[0]] if wide else [[]]
        most = next(
            n
            for n in (MOST_BANDS, 12, 8, 6, 4)
            if n == 4 or _cells(n, rows, cols, across, deep) <= most_cells
        )
        counts = [len(rows), len(cols), len(across), len(deep)]
        folded_rows = _folded(rows, most)
        label = max(self._label_width(rows, run) for run in (cols[0], cols[-1])) if cols else 1
        folded_cols = _folded(cols, min(most, max(4, COLUMNS // (label + 3))))
        folded_across = _folded(across, most // 2)
        folded_deep = _folded(deep, most // 2)
        panels = []
        for lead_runs in folded_deep if self._has_elements else []:
            if isinstance(lead_runs, int):
                panels.append((_gap(lead_runs * len(across)),))
                continue
            panels.append(
                tuple(
                    _gap(run)
                    if isinstance(run, int)
                    else self._panel([*lead_runs, *run], folded_rows, folded_cols)
                    for run in folded_across
                )
            )
        drawn = [folded_rows, folded_cols, folded_across, folded_deep]
        return Blocks(title, tuple(panels), self._empty(), tuple(self._notes(counts, drawn)))

    @property
    def _has_elements(self) -> bool:
        return all(dim.size for dim in self.dims)

    def _lines(self) -> tuple[list[list[Run]], list[list[Run]]]:
        """The runs of the dims before the last two, and those of the last two."""
        runs = [list(dim.runs) for dim in self.dims]
        if self.values is not None:
            runs[:-2] = [
                [
                    Run(i, i + 1, run.coords)
                    for run in runs_of_dim
                    for i in range(run.start, run.stop)
                ]
                for runs_of_dim in runs[:-2]
            ]
        nothing = [Run(0, 1, ((),))]  # a dim that the tensor lacks
        last = [*[nothing] * (2 - len(runs)), *runs[-2:]]
        return runs[:-2], last

    def _panel(
        self, lead: Sequence[Run], rows: Sequence[Run | int], cols: Sequence[Run | int]
    ) -> Panel:
        n = len(self.dims)
        axes = [dim.axes for dim in self.dims]
        row_axes, col_axes = axes[-2] if n > 1 else (), axes[-1] if n else ()
        cells = tuple(
            tuple(
                None if isinstance(r, int) or isinstance(c, int) else self._cell([*lead, r, c])
                for c in cols
            )
            for r in rows
        )
        return Panel(
            self._label(lead),
            "" if self.named else ",".join(_names(self.dims[: len(lead)], lead)),
            "" if n < 2 or self.named else f"dim {n - 2}",
            "" if n < 1 or self.named else f"dim {n - 1}",
            tuple(_bands(rows, row_axes)),
            tuple(_bands(cols, col_axes)),
            cells,
        )

    def _label(self, lead: Sequence[Run]) -> str:
        if not lead:
            return ""
        if self.named:
            dims = self.dims[: len(lead)]
            pairs = zip(dims, lead, strict=True)
            return ", ".join(name_of(dim.axes, run.coords[0]) for dim, run in pairs)
        return f"[{', '.join(map(_index, lead))}, :, :]"

    def _cell(self, runs: Sequence[Run]) -> Cell | None:
        """The block at a run of each dim, those that the tensor lacks included."""
        runs = runs[len(runs) - len(self.dims) :] if self.dims else []
        ranks = self._holders(tuple(run.coords for run in runs))
        if not ranks:
            return None
        names = _names(self.dims, runs)
        if self.term is not None:
            names.append(self.term[0])
        holders = ("rank " if len(ranks) == 1 else "ranks ") + ranks_text(ranks)
        where = f" ({','.join(names)})" if names and not self.named else ""
        what = f"[{', '.join(map(_index, runs))}]"
        hold = "holds" if len(ranks) == 1 else "hold" if not self.pending else "each hold"
        term = "a term of " if self.pending else ""
        about = f"{holders}{where} {hold} {term}{what}"
        if self.named:
            about = f"{holders} is at {', '.join(names)}" if names else holders
        shown = self.values(ranks, runs) if self.values is not None else ()
        plus = "+" if self.pending else ""
        return Cell(ranks, plus + short(ranks), self.pending, about, shown)

    def _holders(self, coords: tuple[tuple[Coord, ...], ...]) -> tuple[int, ...]:
        """The ranks at one of `coords` of every dim, ascending."""
        known = self.ranks.get(coords)
        if known is None:
            mesh = self.type.mesh
            ranks: set[int] = set()
            for choice in product(*coords):
                at = dict(self.fixed)
                for dim, coord in zip(self.dims, choice, strict=True):
                    at.update(zip(dim.axes, coord, strict=True))
                free = [axis for axis in mesh.axes if axis not in at]
                ranks.update(mesh.coset(free, tuple(at.get(axis, 0) for axis in mesh.axes)))
            known = self.ranks[coords] = tuple(sorted(ranks))
        return known

    def _label_width(self, rows: Sequence[Run], col: Run) -> int:
        lead = [dim.runs[-1] for dim in self.dims[:-2] if dim.runs]
        cell = self._cell([*lead, rows[-1], col]) if rows and self._has_elements else None
        return len(cell.label) if cell else 1

    def _empty(self) -> str:
        empty = empty_ranks(self.type)
        if self.term is not None:
            mesh = self.type.mesh
            at = {mesh.axis(axis): index for axis, index in self.fixed.items()}
            coords = ((rank, mesh.coord(rank) or ()) for rank in empty)
            empty = [rank for rank, c in coords if all(c[i] == k for i, k in at.items())]
        if not empty or not self._has_elements:
            return ""
        names = ranks_text(sorted(empty))
        return (
            f"ranks {names} hold no element" if len(empty) > 1 else f"rank {names} holds no element"
        )

    def _notes(self, counts: Sequence[int], drawn: Sequence[Sequence[object]]) -> Iterator[str]:
        if not self._has_elements:
            yield "no elements: every block is empty"
            return
        names = ("rows of blocks", "columns of blocks", "columns of panels", "rows of panels")
        for name, count, entries in zip(names, counts, drawn, strict=True):
            shown = sum(not isinstance(entry, int) for entry in entries)
            if shown < count:
                yield f"{shown} of {count} {name} are drawn"


def _cells(most: int, *lines: Sequence[object]) -> int:
    limits = (most, most, most // 2, most // 2)
    return prod(min(len(line), limit) for line, limit in zip(lines, limits, strict=True))


def _folded(entries: Sequence[T], most: int) -> list[T | int]:
    """At most so many entries: the first and the last ones, with how many there are between."""
    if len(entries) <= most:
        return list(entries)
    tail = 1 if most < 6 else 2
    head = max(1, most - 1 - tail)
    return [*entries[:head], len(entries) - head - tail, *entries[-tail:]]


def _bands(runs: Sequence[Run | int], axes: tuple[str, ...]) -> Iterator[Band]:
    for i, run in enumerate(runs):
        if isinstance(run, int):
            before, after = runs[i - 1], runs[i + 1]
            yield Band(before.stop, after.start, "", run)  # type: ignore[union-attr]
        else:
            yield Band(run.start, run.stop, "|".join(name_of(axes, c) for c in run.coords[:2]))


def _names(dims: Sequence[Dim], runs: Sequence[Run]) -> list[str]:
    """The coordinates at which the runs are held."""
    return [
        name_of(dim.axes, run.coords[0])
        for dim, run in zip(dims, runs, strict=True)
        if dim.axes and len(run.coords) == 1
    ]


def _gap(count: int) -> Panel:
    return Panel(f"{count} more", "", "", "", (), (), ())


def _index(run: Run) -> str:
    return str(run.start) if run.stop == run.start + 1 else f"{run.start}:{run.stop}"


def value_texts(
    type: TensorType, held: Mapping[int, Sequence[object]], show: Callable[[object], str]
) -> Values:
    """The values of the blocks that `held` has as nested lists, by rank."""

    def values(ranks: Sequence[int], runs: Sequence[Run]) -> tuple[tuple[str, ...], ...]:
        rank = next((rank for rank in ranks if rank in held), None)
        if rank is None:
            return ()
        local: object = held[rank]
        places = [
            [list(index).index(i) for i in range(run.start, run.stop)]
            for index, run in zip(type.index(rank), runs, strict=True)
        ]
        for indices in places[:-2]:
            local = local[indices[0]]  # type: ignore[index]
        if not places:
            return ((show(local),),)
        if len(places) == 1:
            return (tuple(show(local[j]) for j in places[-1]),)  # type: ignore[index]
        rows, cols = places[-2:]
        return tuple(tuple(show(local[i][j]) for j in cols) for i in rows)  # type: ignore[index]

    return values
