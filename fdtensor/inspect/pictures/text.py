"""`text_lines`: a picture as lines of text with styles, of at most so many columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from typing_extensions import assert_never

from fdtensor.inspect.pictures.canvas import Canvas, Line, Style, wrapped
from fdtensor.inspect.pictures.facts import (
    Blocks,
    Description,
    Facts,
    Move,
    Note,
    Row,
    Section,
    Table,
    Timeline,
)
from fdtensor.inspect.pictures.panel_text import panel_canvas, panel_width

__all__ = ["LEAST_WIDTH", "plain", "section_lines", "text_lines"]

LEAST_WIDTH = 40
"""The fewest columns."""

BAR = 8
DENSITY = " .:#"


def plain(lines: Sequence[Line]) -> str:
    """Lines as text, without styles."""
    return "\n".join("".join(piece for piece, _ in line).rstrip() for line in lines)


def text_lines(picture: Description, width: int, box: bool = False) -> list[Line]:
    """The lines of a picture; `box` draws with the lines of Unicode."""
    width = max(LEAST_WIDTH, width)
    lines: list[Line] = [_line(text, "title") for text in wrapped(picture.title, width)]
    before: Section | None = None
    for section in picture.sections:
        close = before is None or isinstance(section, Note) or isinstance(before, Move)
        lines += [] if close else [()]
        lines += section_lines(section, width, box)
        before = section
    return lines


def section_lines(section: Section, width: int, box: bool) -> list[Line]:
    """The lines of one part."""
    match section:
        case Facts():
            return list(_facts(section, width))
        case Blocks():
            return list(_blocks(section, width, box))
        case Move(title, detail):
            return [*_wrap(title, width, "strong"), *_wrap(detail, width, "muted", "   ")]
        case Table():
            return list(_table(section, width, box))
        case Timeline():
            return list(_timeline(section, width, box))
        case Note(text):
            return list(_wrap(text, width, "muted", "  "))
        case other:
            assert_never(other)


def _line(text: str, style: Style = "") -> Line:
    return ((text, style),)


def _wrap(text: str, width: int, style: Style = "", indent: str = "") -> Iterator[Line]:
    if text:
        yield from (_line(indent + piece, style) for piece in wrapped(text, width - len(indent)))


def _facts(section: Facts, width: int) -> Iterator[Line]:
    wide = min(24, max((len(name) for name, _ in section.rows), default=0))
    for name, text in section.rows:
        if len(name) > wide:
            yield from _wrap(name, width, "name", "  ")
            name = ""
        first, *rest = wrapped(text, width - wide - 4)
        yield (f"  {name:<{wide}}", "name"), (f"  {first}", "")
        yield from (_line(" " * (wide + 4) + line) for line in rest)


# --- blocks ----------------------------------------------------------------------------------


def _blocks(section: Blocks, width: int, box: bool) -> Iterator[Line]:
    yield from _wrap(section.title, width, "title")
    for panels in section.panels:
        wide = panel_width(len(panels), width)
        drawn = [panel_canvas(panel, wide, width, box) for panel in panels]
        for i, shelf in enumerate(_rows_of(drawn, width)):
            if panels is not section.panels[0] or i:
                yield ()
            yield from _beside(shelf)
    if section.empty:
        yield from _wrap(section.empty, width, "", "  ")
    for note in section.notes:
        yield from _wrap(note, width, "muted", "  ")


def _rows_of(drawn: Sequence[Canvas], width: int) -> Iterator[list[Canvas]]:
    """The canvases side by side, as many as there is room for."""
    shelf: list[Canvas] = []
    for canvas in drawn:
        if shelf and sum(c.width for c in shelf) + len(shelf) + canvas.width > width:
            yield shelf
            shelf = []
        shelf.append(canvas)
    if shelf:
        yield shelf


def _beside(canvases: Sequence[Canvas]) -> Iterator[Line]:
    columns = [canvas.lines() for canvas in canvases]
    for y in range(max(map(len, columns))):
        pieces: list[tuple[str, Style]] = []
        margin = 0
        for canvas, lines in zip(canvases, columns, strict=True):
            line = lines[y] if y < len(lines) else ()
            used = sum(len(text) for text, _ in line)
            if line:
                pieces += [(" " * margin, ""), *line]
                margin = 0
            margin += canvas.width + 1 - used
        yield tuple(pieces)


# --- tables ----------------------------------------------------------------------------------


def _table(section: Table, width: int, box: bool) -> Iterator[Line]:
    rows = [Row(section.head), *section.rows] if any(section.head) else list(section.rows)
    bar = BAR + 2 if section.bars else 0
    room = width - 2 - bar
    widths = [
        max((len(row.cells[i]) for row in rows), default=0) for i in range(len(section.align))
    ]
    while sum(widths) + 2 * (len(widths) - 1) > room and max(widths) > 4:
        widths[widths.index(max(widths))] -= 1
    most = max([row.share or 0.0 for row in rows], default=0.0) or 1.0
    for i, row in enumerate(rows):
        head = bool(any(section.head)) and i == 0
        style = "name" if head else "marked" if row.marked else ""
        cells = [wrapped(cell, n) for cell, n in zip(row.cells, widths, strict=True)]
        for y in range(max(map(len, cells))):
            texts = [c[y] if y < len(c) else "" for c in cells]
            line = "  ".join(
                f"{t:{side}{n}}" for t, side, n in zip(texts, section.align, widths, strict=True)
            )
            if not bar:
                yield _line(f"  {line}".rstrip(), style)
                continue
            drawn = _bar((row.share or 0.0) / most, box) if y == 0 and not head else ""
            yield (f"  {drawn:<{BAR}}  ", "bar"), (line.rstrip(), style)


def _bar(share: float, box: bool) -> str:
    count = round(share * BAR)
    if count == 0:
        return "." if share > 0.01 else ""
    return ("\u2588" if box else "#") * count


# --- timeline --------------------------------------------------------------------------------


def _timeline(section: Timeline, width: int, box: bool) -> Iterator[Line]:
    names = max(len(lane.name) for lane in section.lanes)
    room = width - names - 6
    density = " \u2591\u2592\u2588" if box else DENSITY
    for lane in section.lanes:
        busy = [0.0] * room
        for span in lane.spans:
            low, high = (t / section.stop * room for t in (span.start, span.stop))
            for x in range(int(low), min(room, int(high) + 1)):
                busy[x] += max(0.0, min(high, x + 1) - max(low, x))
        chars = [density[0 if b <= 0 else 1 if b < 1 / 3 else 2 if b < 2 / 3 else 3] for b in busy]
        for span in lane.spans:
            low, high = (int(t / section.stop * room) for t in (span.start, span.stop))
            if high - low >= len(span.label) + 2:
                at = (low + high - len(span.label)) // 2
                chars[at : at + len(span.label)] = span.label
        pieces = [(char, "lane" if char != " " else "") for char in chars]
        merged = [("".join(c for c, _ in same), style) for style, same in _by_style(pieces)]
        edge = "\u2502" if box else "|"
        yield (f"  {lane.name:<{names}} {edge}", "name"), *merged, (edge, "name")
    left = " " * (names + 4)
    yield _line(f"{left}{'0':<{room - len(section.ends)}}{section.ends}", "muted")


def _by_style(pieces: Sequence[tuple[str, str]]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for style, same in groupby(pieces, key=lambda piece: piece[1]):
        yield style, list(same)
