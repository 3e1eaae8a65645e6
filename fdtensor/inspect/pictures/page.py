"""`fragment`, `page`, `drawing`: a picture as HTML for a notebook, as a page, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from itertools import groupby

from typing_extensions import assert_never

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
    owners,
)
from fdtensor.inspect.pictures.style import DRAWING, STYLE
from fdtensor.inspect.pictures.svg import Drawn, panel_svg, timeline_svg
from fdtensor.inspect.pictures.text import plain, section_lines

__all__ = ["drawing", "fragment", "page"]

WIDE, NARROW = 420, 230
"""The pixels that a panel takes alone, and among others."""


def fragment(picture: Description) -> str:
    """The picture as one HTML element, with its style inside."""
    return (
        f'<div class="fdshow" role="figure" aria-label="{escape(picture.title)}">'
        f"<style>{STYLE}</style>{_body(picture)}</div>"
    )


def page(picture: Description) -> str:
    """The picture as a page of its own, for light and dark screens."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width"/>'
        f"<title>{escape(picture.title)}</title>"
        "<style>:root{color-scheme:light dark}body{margin:24px}</style></head>"
        f"<body>{fragment(picture)}</body></html>\n"
    )


def _body(picture: Description) -> str:
    colors = owners(picture.sections)
    many = sum(isinstance(section, Blocks) for section in picture.sections) > 1
    parts = [f'<div class="fdshow-title">{escape(picture.title)}</div>']
    for stages, group in groupby(picture.sections, lambda s: isinstance(s, (Blocks, Move))):
        drawn = "".join(_section(section, colors, many) for section in group)
        parts.append(f'<div class="fdshow-stages">{drawn}</div>' if stages else drawn)
    return "".join(parts)


def _section(section: Section, colors: Mapping[int, float], many: bool) -> str:
    match section:
        case Facts(rows):
            cells = "".join(
                f'<div class="fdshow-name">{escape(name)}</div><div>{escape(text)}</div>'
                for name, text in rows
            )
            return f'<div class="fdshow-facts">{cells}</div>'
        case Blocks():
            return _blocks(section, colors, many)
        case Move(title, detail):
            return (
                '<div class="fdshow-move"><div class="fdshow-arrow" aria-hidden="true">\u2192</div>'
                f"<b>{escape(title)}</b><div>{escape(detail)}</div></div>"
            )
        case Table():
            return "".join(_table(section))
        case Timeline():
            drawn = timeline_svg(section).element("compute and communication by time")
            return f'<div class="fdshow-scroll">{drawn}</div>'
        case Note(text):
            return f'<div class="fdshow-note">{escape(text)}</div>'
        case other:
            assert_never(other)


def _blocks(section: Blocks, colors: Mapping[int, float], many: bool) -> str:
    parts = []
    if section.title:
        parts.append(f'<div class="fdshow-caption">{escape(section.title)}</div>')
    room = NARROW if many or sum(map(len, section.panels)) > 1 else WIDE
    for panels in section.panels:
        drawn = "".join(
            panel_svg(p, colors, room).element(_about(section, p.label)) for p in panels
        )
        parts.append(f'<div class="fdshow-panels">{drawn}</div>')
    if section.empty:
        parts.append(f'<div class="fdshow-empty">{escape(section.empty)}</div>')
    parts += [f'<div class="fdshow-note">{escape(note)}</div>' for note in section.notes]
    return f'<div class="fdshow-blocks">{"".join(parts)}</div>'


def _about(section: Blocks, label: str) -> str:
    return " ".join(filter(None, ["blocks", section.title, label]))


def _table(section: Table) -> Iterator[str]:
    yield '<div class="fdshow-scroll"><table class="fdshow-table">'
    if any(section.head):
        yield f"<thead>{_row(section, Row(section.head), 'th')}</thead>"
    yield "<tbody>"
    most = max([row.share or 0.0 for row in section.rows], default=0.0) or 1.0
    for row in section.rows:
        yield _row(section, row, "td", most)
    yield "</tbody></table></div>"


def _row(section: Table, row: Row, tag: str, most: float = 1.0) -> str:
    cells = []
    if section.bars:
        wide = round(60 * (row.share or 0.0) / most)
        bar = f'<span class="fdshow-bar" style="width:{wide}px"></span>' if wide else ""
        cells.append(f"<{tag}>{bar}</{tag}>")
    for text, side in zip(row.cells, section.align, strict=True):
        kind = ' class="fdshow-right"' if side == ">" else ""
        cells.append(f"<{tag}{kind}>{escape(text)}</{tag}>")
    kind = ' class="fdshow-marked"' if row.marked else ""
    return f"<tr{kind}>{''.join(cells)}</tr>"


# --- one SVG ---------------------------------------------------------------------------------

COLUMNS, HIGH, ACROSS = 100, 17, 16 + 728
"""Columns of text, the height of a line, and the width of the picture in pixels."""


def drawing(picture: Description) -> str:
    """The picture as one SVG file: texts as they are printed, panels and timelines drawn."""
    colors = owners(picture.sections)
    many = sum(isinstance(section, Blocks) for section in picture.sections) > 1
    parts, y, wide = [_line(picture.title, 26, bold=True)], 40, ACROSS
    for section in picture.sections:
        if isinstance(section, Blocks):
            for text in filter(None, [section.title]):
                y += HIGH
                parts.append(_line(text, y))
            room = NARROW if many or sum(map(len, section.panels)) > 1 else WIDE
            for panels in section.panels:
                rows = _shelves([panel_svg(p, colors, room) for p in panels])
                for row in rows:
                    x = 16
                    for panel in row:
                        parts.append(panel.element(section.title or "blocks", (x, y + 4)))
                        x += panel.width + 16
                    wide, y = max(wide, x), y + 8 + max(panel.height for panel in row)
            for text in (*filter(None, [section.empty]), *section.notes):
                y += HIGH
                parts.append(_line(text, y))
        elif isinstance(section, Timeline):
            drawn = timeline_svg(section)
            parts.append(drawn.element("compute and communication by time", (0, y + 6)))
            y += drawn.height + 8
        else:
            for line in plain(section_lines(section, COLUMNS, False)).split("\n"):
                y += HIGH
                parts.append(_line(line, y))
        y += 8
    paper = '<rect class="fdshow-paper" width="100%" height="100%"/>'
    whole = Drawn(f"<style>{DRAWING}</style>{paper}{''.join(parts)}", wide, y + 16)
    return whole.element(picture.title) + "\n"


def _line(text: str, y: int, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="16" y="{y}" font-size="12"{weight} xml:space="preserve">{escape(text)}</text>'


def _shelves(drawn: list[Drawn]) -> Iterator[list[Drawn]]:
    shelf: list[Drawn] = []
    for one in drawn:
        if shelf and sum(d.width + 16 for d in shelf) + one.width > ACROSS:
            yield shelf
            shelf = []
        shelf.append(one)
    if shelf:
        yield shelf
