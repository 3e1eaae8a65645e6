"""`panel_canvas`: a panel drawn with characters."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from fdtensor.inspect.pictures.canvas import Canvas, spread
from fdtensor.inspect.pictures.facts import Band, Cell, Panel

__all__ = ["panel_canvas", "panel_width"]

GAP = 5


def panel_width(count: int, width: int) -> int:
    """How many columns a panel may take where so many are side by side."""
    return width if count < 2 else max(30, (width - 1) // 2)


def panel_canvas(panel: Panel, wide: int, width: int, box: bool = False) -> Canvas:
    """The panel in `wide` columns, or in at most `width`.

    If need be with fewer columns of blocks, without values, without the names of rows.
    """
    if not panel.cells:
        canvas = Canvas(len(panel.label) + 6, 4, box)
        canvas.put(1, 3, f"... {panel.label}", "muted")
        return canvas
    panel = _titled(panel, wide - _left(panel) - 4)
    if _has_values(panel):
        for room in (wide, width):
            for keep in range(len(panel.cols), 0, -1):
                canvas = _values(_folded(panel, keep), box)
                if canvas.width <= room and (keep == len(panel.cols) or room == width):
                    return canvas
    panel = _bare(panel)
    canvas = _plain(panel, wide, box)
    for tried in (panel, _bare(panel, names=False)):
        for keep in range(len(panel.cols), 0, -1):
            if canvas.width > wide:
                canvas = _plain(_folded(tried, keep), wide, box)
    return canvas


def _titled(panel: Panel, room: int) -> Panel:
    """The panel with as much of its label and name as there is room for."""
    label, name = panel.label, panel.name
    if len(label) > room:
        return attrs.evolve(panel, label=f"{label[: room - 3]}...", name="")
    return attrs.evolve(panel, name="" if len(label) + 2 + len(name) > room else name)


def _folded(panel: Panel, keep: int) -> Panel:
    """The panel with so many columns: the first ones, a gap, and the last one."""
    n = len(panel.cols)
    if keep >= n:
        return panel
    head = max(0, keep - 2)
    while head and panel.cols[head - 1].left_out:
        head -= 1
    left = panel.cols[head : n - 1]
    gap = Band(left[0].start, left[-1].stop, "", sum(band.left_out or 1 for band in left))
    return attrs.evolve(
        panel,
        cols=(*panel.cols[:head], gap, panel.cols[-1]),
        cells=tuple((*row[:head], None, row[-1]) for row in panel.cells),
    )


def _bare(panel: Panel, *, names: bool = True) -> Panel:
    """The panel without the values of its cells, and maybe without the names of its rows."""
    cells = tuple(
        tuple(cell and attrs.evolve(cell, values=()) for cell in row) for row in panel.cells
    )
    rows = panel.rows if names else tuple(attrs.evolve(b, name="") for b in panel.rows)
    return attrs.evolve(panel, cells=cells, rows=rows)


def _has_values(panel: Panel) -> bool:
    return any(cell.values for row in panel.cells for cell in row if cell)


def _plain(panel: Panel, width: int, box: bool) -> Canvas:
    left = _left(panel)
    labels = [
        max([len(c.label) + 2 for c in column if c] or [3])
        for column in zip(*panel.cells, strict=True)
    ]
    least = [GAP if b.left_out else n for b, n in zip(panel.cols, labels, strict=True)]
    names = [max(n, len(b.name) + 2) for b, n in zip(panel.cols, least, strict=True)]
    inside = width - left - 2 - len(str(panel.cols[-1].stop)) + 1
    named = any(b.name for b in panel.cols) and sum(names) + len(names) <= inside
    wide = [n + 1 for n in (names if named else least)]
    weights = [0.0 if b.left_out else float(b.stop - b.start) for b in panel.cols]
    most = _aspect(panel, inside)
    columns = [n - 1 for n in spread(max(most, sum(wide)), weights, wide)]
    heights = _heights(panel)
    canvas = _framed(panel, columns, heights, left, named, box)
    for i, j, cell, x, y in _cells(panel, columns, heights, left, named):
        canvas.fill(x, y, columns[j], heights[i], cell.owner)
        label = cell.label[: columns[j]]
        canvas.put(x + (columns[j] - len(label)) // 2, y + heights[i] // 2, label, cell.owner)
    return canvas


def _heights(panel: Panel) -> list[int]:
    """How many lines each row takes: one, or more where they differ or are few."""
    sizes = [0.0 if b.left_out else float(b.stop - b.start) for b in panel.rows]
    if len(set(sizes)) == 1:
        tall = panel.rows_of and not panel.label and len(sizes) < 3
        return [3 if tall else 1] * len(sizes)
    return spread(max(len(sizes), min(10, 2 * len(sizes))), sizes, [1] * len(sizes))


def _aspect(panel: Panel, inside: int) -> int:
    """How many columns a panel takes, so that its shape is not distorted too much."""
    if not panel.cols_of:
        return 14
    rows, cols = (sum(b.stop - b.start for b in bands) for bands in (panel.rows, panel.cols))
    return min(inside, max(18, round(44 * min(1.0, max(0.4, cols / max(rows, 1))))))


def _values(panel: Panel, box: bool) -> Canvas:
    left = _left(panel)
    named = any(band.name for band in panel.cols)
    shown = [v for row in panel.cells for cell in row if cell for line in cell.values for v in line]
    element = max(map(len, shown), default=1) + 1
    columns = []
    for band, column in zip(panel.cols, zip(*panel.cells, strict=True), strict=True):
        label = max([len(cell.label) + 2 for cell in column if cell] or [1])
        columns.append(max((band.stop - band.start) * element + 1, label, len(band.name) + 1))
    heights = [band.stop - band.start for band in panel.rows]
    canvas = _framed(panel, columns, heights, left, named, box)
    for i, j, cell, x, y in _cells(panel, columns, heights, left, named):
        canvas.fill(x, y, columns[j], heights[i], cell.owner)
        canvas.put(x, y - 1, f" {cell.label} "[: columns[j]], "label")
        for k, line in enumerate(cell.values):
            width = (columns[j] - 1) // max(1, len(line))
            text = "".join(f"{value:>{width}}" for value in line)
            canvas.put(x, y + k, text, cell.owner)
    return canvas


def _left(panel: Panel) -> int:
    """The columns that the labels of rows take."""
    names = [len(band.name) for band in panel.rows]
    if panel.rows_of:
        names += [len(str(band.stop)) for band in panel.rows]
    return max(names) + 2


def _cells(
    panel: Panel, columns: Sequence[int], heights: Sequence[int], left: int, named: bool
) -> list[tuple[int, int, Cell, int, int]]:
    """The cells, each with its row, its column and where its inside starts."""
    cells = []
    y = _top(panel, named) + 1
    for i, row in enumerate(panel.cells):
        x = left + 2
        for j, cell in enumerate(row):
            if cell is not None:
                cells.append((i, j, cell, x, y))
            x += columns[j] + 1
        y += heights[i] + 1
    return cells


def _top(panel: Panel, named: bool) -> int:
    return bool(panel.label) + named + bool(panel.cols_of)


def _framed(
    panel: Panel, columns: Sequence[int], heights: Sequence[int], left: int, named: bool, box: bool
) -> Canvas:
    """A canvas with the names, the indices at the edges, the borders and the gaps."""
    top = _top(panel, named)
    width = max(
        left + 2 + sum(columns) + len(columns), len(panel.label) + len(panel.name) + left + 4
    )
    last = str(panel.cols[-1].stop) if panel.cols_of else " "
    canvas = Canvas(width + len(last) - 1, top + 1 + sum(heights) + len(heights), box)
    canvas.put(left + 1, 0, panel.label, "muted")
    canvas.put(left + 3 + len(panel.label), 0, panel.name, "name")
    x, free = left + 1, 0
    for band, size in zip(panel.cols, columns, strict=True):
        if named and len(band.name) <= size:
            name = "..." if band.left_out else band.name
            canvas.put(x + 1 + (size - len(name)) // 2, top - bool(panel.cols_of) - 1, name, "name")
        if panel.cols_of and x >= free:
            canvas.put(x, top - 1, str(band.start), "muted")
            free = x + len(str(band.start)) + 1
        x += size + 1
    if panel.cols_of and x >= free:
        canvas.put(x, top - 1, last, "muted")
    y = top
    for band, size in zip(panel.rows, heights, strict=True):
        if panel.rows_of:
            canvas.put(left - len(str(band.start)), y, str(band.start), "muted")
        name = "..." if band.left_out else band.name
        canvas.put(left - len(name), y + 1 + size // 2, name, "name")
        y += size + 1
    if panel.rows_of:
        canvas.put(left - len(str(panel.rows[-1].stop)), y, str(panel.rows[-1].stop), "muted")
    _borders(canvas, panel, columns, heights, left, top)
    return canvas


def _borders(
    canvas: Canvas,
    panel: Panel,
    columns: Sequence[int],
    heights: Sequence[int],
    left: int,
    top: int,
) -> None:
    y = top
    for i, row in enumerate(panel.rows):
        x = left + 1
        for j, column in enumerate(panel.cols):
            middle = x + 1 + (columns[j] - 3) // 2, y + 1 + heights[i] // 2
            if row.left_out or column.left_out:
                canvas.put(*middle, "...", "muted")
            else:
                canvas.frame(x, y, columns[j] + 2, heights[i] + 2)
            x += columns[j] + 1
        y += heights[i] + 1
