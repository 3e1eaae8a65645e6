"""`panel_svg` and `timeline_svg`: panels and timelines as SVG; without ids, fonts or scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import attrs

from fdtensor.inspect.pictures.canvas import spread
from fdtensor.inspect.pictures.facts import Band, Cell, Panel, Timeline
from fdtensor.inspect.pictures.palette import color, ink
from fdtensor.inspect.pictures.style import MONO

__all__ = ["Drawn", "panel_svg", "timeline_svg"]

CHAR, SMALL, LINE, GAP = 7.3, 6.1, 18, 30
"""The width of a character of a label and of an index, the height of an element, of a gap."""


@attrs.frozen
class Drawn:
    """A piece of SVG, without the element around it, and its size."""

    content: str
    width: int
    height: int

    def element(self, about: str, at: tuple[int, int] | None = None) -> str:
        """The `svg` element; at a place inside of another one where `at` is given."""
        place = f' x="{at[0]}" y="{at[1]}"' if at else ' xmlns="http://www.w3.org/2000/svg"'
        return (
            f'<svg{place} width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(about)}" '
            f'font-family="{MONO}" fill="currentColor">{self.content}</svg>'
        )


def panel_svg(panel: Panel, colors: Mapping[int, float], room: int) -> Drawn:
    """A panel about `room` pixels wide, or as wide as its labels need."""
    if not panel.cells:
        text = _text(20, 40, "\u22ef", 16, "middle", 0.6) + _text(8, 58, panel.label, 10, muted=0.7)
        return Drawn(text, int(16 + len(panel.label) * SMALL), 80)
    named = any(band.name for band in panel.cols)
    widths, heights = _widths(panel, room), _heights(panel, room)
    left = _left(panel)
    top = 4 + 18 * bool(panel.label) + 15 * named + 14 * bool(panel.cols_of)
    parts = [_text(left, 14, panel.label, 11, muted=0.85)] if panel.label else []
    if panel.name:
        parts.append(_text(left + (len(panel.label) + 2) * CHAR, 14, panel.name, 10, bold=True))
    parts += _edges(panel, widths, heights, left, top)
    y = top
    for row, band, height in zip(panel.cells, panel.rows, heights, strict=True):
        x = left
        for cell, column, width in zip(row, panel.cols, widths, strict=True):
            if cell is not None:
                parts += _cell(cell, (x, y, width, height), band, column, colors[cell.owner])
            elif band.left_out or column.left_out:
                middle = x + width / 2, y + height / 2 + 4
                parts.append(
                    _text(*middle, "\u22ef" if column.left_out else "\u22ee", 13, "middle", 0.6)
                )
            x += width
        y += height
    right = left + sum(widths)
    tail = len(str(panel.cols[-1].stop)) * SMALL / 2 if panel.cols_of else 0
    wide = max(right + tail, left + (len(panel.label) + len(panel.name) + 2) * CHAR) + 4
    return Drawn("".join(parts), round(wide), y + 8)


def _text(
    x: float, y: float, text: str, size: int, anchor: str = "start", muted: float = 1.0,
    fill: str = "", bold: bool = False,
) -> str:  # fmt: skip
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}"'
        + (f' text-anchor="{anchor}"' if anchor != "start" else "")
        + (f' opacity="{muted:g}"' if muted < 1 else "")
        + (f' fill="{fill}"' if fill else "")
        + (' font-weight="600"' if bold else "")
        + f">{escape(text)}</text>"
    )


# --- sizes -----------------------------------------------------------------------------------


def _element(panel: Panel) -> float:
    """The width of an element's value; 0 where none are shown."""
    texts = [v for row in panel.cells for cell in row if cell for line in cell.values for v in line]
    return max(24.0, max(map(len, texts)) * CHAR + 10) if texts else 0.0


def _sizes(bands: Sequence[Band]) -> list[float]:
    return [0.0 if band.left_out else float(band.stop - band.start) for band in bands]


def _widths(panel: Panel, room: int) -> list[int]:
    sizes, element = _sizes(panel.cols), _element(panel)
    least = []
    for band, column in zip(panel.cols, zip(*panel.cells, strict=True), strict=True):
        label = max([len(cell.label) for cell in column if cell] or [1]) * CHAR + 10
        name = len(band.name) * SMALL + 8
        wide = max(label, name, (band.stop - band.start) * element)
        least.append(GAP if band.left_out else round(wide))
    if not panel.cols_of and not any(band.name for band in panel.cols):
        return [max(56, n) for n in least]
    aspect = sum(sizes) / max(1.0, sum(_sizes(panel.rows)))
    wide = min(room, max(room * 0.4, sum(sizes) * 34), max(150.0, 240 * aspect))
    return spread(max(sum(least), round(wide)), sizes, least)


def _heights(panel: Panel, room: int) -> list[int]:
    sizes = _sizes(panel.rows)
    if _element(panel):
        return [round(size) * LINE + 16 for size in sizes]
    least = [22 if band.left_out else 26 for band in panel.rows]
    if not panel.rows_of and not any(band.name for band in panel.rows):
        return [34] * len(sizes)
    aspect = sum(sizes) / max(1.0, sum(_sizes(panel.cols)))
    tall = min(room * 0.6, sum(sizes) * 26, max(room * 0.22, room * aspect))
    return spread(max(sum(least), round(tall)), sizes, least)


def _left(panel: Panel) -> int:
    names = [len(band.name) for band in panel.rows]
    if panel.rows_of:
        names += [len(str(band.stop)) for band in panel.rows]
    return round(max(names) * SMALL + 10)


# --- parts -----------------------------------------------------------------------------------


def _edges(
    panel: Panel, widths: Sequence[int], heights: Sequence[int], left: int, top: int
) -> Iterator[str]:
    """Names and indices along the upper and the left edge."""
    x, free = float(left), 0.0
    line = top - 5 - 14 * bool(panel.cols_of)
    bounds = [(band.start, band) for band in panel.cols] + [(panel.cols[-1].stop, None)]
    for (index, band), width in zip(bounds, [*widths, 0], strict=True):
        half = len(str(index)) * SMALL / 2
        if panel.cols_of and x - half >= free:
            yield _text(x, top - 5, str(index), 10, "middle", 0.7)
            free = x + half + 4
        if band is not None:
            name = f"+{band.left_out}" if band.left_out else band.name
            if name:
                yield _text(x + width / 2, line, name, 10, "middle", 0.85, bold=not band.left_out)
        x += width
    y = float(top)
    for band, height in zip(panel.rows, heights, strict=True):
        if panel.rows_of:
            yield _text(left - 5, y + 4, str(band.start), 10, "end", 0.7)
        name = f"+{band.left_out}" if band.left_out else band.name
        if name:
            yield _text(left - 5, y + height / 2 + 4, name, 10, "end", 0.85, bold=not band.left_out)
        y += height
    if panel.rows_of:
        yield _text(left - 5, y + 4, str(panel.rows[-1].stop), 10, "end", 0.7)


def _cell(
    cell: Cell, place: tuple[int, int, int, int], row: Band, column: Band, t: float
) -> Iterator[str]:
    """A block: its rectangle, its elements, what is pending, its label and values."""
    x, y, width, height = place
    fill, text = color(t), ink(t)
    yield f"<g><title>{escape(cell.about)}</title>"
    yield (
        f'<rect x="{x + 1}" y="{y + 1}" width="{width - 2}" height="{height - 2}" rx="2" '
        f'fill="{fill}"/>'
    )
    if cell.values:
        yield _text(x + 5, y + 12, cell.label, 10, "start", 0.85, text, bold=True)
        pitch = width / max(1, column.stop - column.start)
        for i, line in enumerate(cell.values):
            for j, value in enumerate(line):
                at = x + (j + 1) * pitch - 6, y + 16 + i * LINE + 12
                yield _text(*at, value, 11, "end", 1.0, text)
        yield "</g>"
        return
    lines = _elements(x, y, width, height, row, column)
    if lines and not cell.pending:
        yield f'<path d="{lines}" stroke="{text}" stroke-opacity=".13" fill="none"/>'
    middle = x + width / 2, y + height / 2
    if cell.pending:
        yield (
            f'<path d="{_hatch(x + 1, y + 1, width - 2, height - 2)}" stroke="{text}" '
            'stroke-opacity=".26" fill="none"/>'
        )
        half = len(cell.label) * CHAR / 2 + 4
        yield (
            f'<rect x="{middle[0] - half:g}" y="{middle[1] - 8:g}" width="{2 * half:g}" '
            f'height="16" rx="3" fill="{fill}"/>'
        )
    yield _text(middle[0], middle[1] + 4, cell.label, 12, "middle", 1.0, text, bold=True) + "</g>"


def _elements(x: int, y: int, width: int, height: int, row: Band, column: Band) -> str:
    """Lines between the elements of a block, where they are large enough to be told apart."""
    parts = []
    across, down = column.stop - column.start, row.stop - row.start
    if 1 < across <= width / 9:
        parts += [f"M{x + width * i / across:.4g} {y + 1}v{height - 2}" for i in range(1, across)]
    if 1 < down <= height / 9:
        parts += [f"M{x + 1} {y + height * i / down:.4g}h{width - 2}" for i in range(1, down)]
    return "".join(parts)


def _hatch(x: int, y: int, width: int, height: int, step: int = 10) -> str:
    """Diagonal lines that fill a rectangle."""
    parts = []
    for c in range(step, width + height, step):  # the points with dx + dy = c
        x0, y0 = (c, 0) if c <= width else (width, c - width)
        x1, y1 = (0, c) if c <= height else (c - height, height)
        parts.append(f"M{x + x0} {y + y0}L{x + x1} {y + y1}")
    return "".join(parts)


# --- timeline --------------------------------------------------------------------------------

FILLS = (("#2f6690", "#ffffff"), ("#e3a83b", "#000000"))
"""The colors of lanes and of the text on them; the first is darker, also in grey."""


def timeline_svg(timeline: Timeline, room: int = 660) -> Drawn:
    """The lanes of a timeline, one below the other."""
    left, tall = 66, 24
    wide = room - left - 10
    parts = []
    for i, lane in enumerate(timeline.lanes):
        y = i * (tall + 6) + 4
        fill, text = FILLS[i % len(FILLS)]
        parts.append(_text(left - 8, y + 16, lane.name, 11, "end", 0.85))
        parts.append(
            f'<rect x="{left}" y="{y}" width="{wide}" height="{tall}" fill="currentColor" '
            'opacity=".08"/>'
        )
        for span in lane.spans:
            x = left + span.start / timeline.stop * wide
            width = max(0.6, (span.stop - span.start) / timeline.stop * wide)
            parts.append(
                f'<g><title>{escape(span.about)}</title><rect x="{x:.5g}" y="{y}" '
                f'width="{max(0.6, width - 0.5):.4g}" height="{tall}" fill="{fill}"/>'
            )
            if width >= len(span.label) * CHAR + 6 and span.label:
                parts.append(
                    _text(round(x + width / 2, 1), y + 16, span.label, 11, "middle", 1.0, text)
                )
            parts.append("</g>")
    y = len(timeline.lanes) * (tall + 6) + 16
    parts.append(_text(left, y, "0", 10, "start", 0.7))
    parts.append(_text(left + wide, y, timeline.ends, 10, "end", 0.7))
    return Drawn("".join(parts), room, y + 6)
