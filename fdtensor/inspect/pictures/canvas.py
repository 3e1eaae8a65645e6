"""`Canvas`: a grid of characters with styles, on which lines join; and how lengths are shared."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

__all__ = ["Canvas", "Line", "Style", "spread", "wrapped"]

Style = str | int
"""A name of a style, or the rank that gives a block its color."""

Line = tuple[tuple[str, Style], ...]
"""A line of text: pieces, each with its style."""

LEFT, RIGHT, UP, DOWN = 1, 2, 4, 8

_BOX = {
    LEFT: "\u2500", RIGHT: "\u2500", LEFT | RIGHT: "\u2500",
    UP: "\u2502", DOWN: "\u2502", UP | DOWN: "\u2502",
    RIGHT | DOWN: "\u250c", LEFT | DOWN: "\u2510", RIGHT | UP: "\u2514", LEFT | UP: "\u2518",
    RIGHT | UP | DOWN: "\u251c", LEFT | UP | DOWN: "\u2524",
    LEFT | RIGHT | DOWN: "\u252c", LEFT | RIGHT | UP: "\u2534",
    LEFT | RIGHT | UP | DOWN: "\u253c",
}  # fmt: skip


class Canvas:
    """Characters to draw on, `box` with the lines of Unicode rather than `+-|`."""

    def __init__(self, width: int, height: int, box: bool = False) -> None:
        self.width, self.height, self.box = width, height, box
        self.chars = [[" "] * width for _ in range(height)]
        self.styles: list[list[Style]] = [[""] * width for _ in range(height)]
        self.bits = [[0] * width for _ in range(height)]

    def put(self, x: int, y: int, text: str, style: Style = "") -> None:
        """Writes text; what is outside is lost."""
        for i, char in enumerate(text):
            if 0 <= x + i < self.width and 0 <= y < self.height:
                self.chars[y][x + i], self.styles[y][x + i] = char, style
                self.bits[y][x + i] = 0

    def fill(self, x: int, y: int, width: int, height: int, style: Style) -> None:
        """Gives a rectangle a style."""
        for row in self.styles[y : y + height]:
            row[x : x + width] = [style] * width

    def frame(self, x: int, y: int, width: int, height: int) -> None:
        """Draws the border of a rectangle, which joins those that it touches."""
        right, bottom = x + width - 1, y + height - 1
        for row in (y, bottom):
            for i in range(x, right):
                self.bits[row][i] |= RIGHT
                self.bits[row][i + 1] |= LEFT
        for column in (x, right):
            for i in range(y, bottom):
                self.bits[i][column] |= DOWN
                self.bits[i + 1][column] |= UP

    def lines(self) -> list[Line]:
        """The lines, without blanks at their ends."""
        return [self._line(y) for y in range(self.height)]

    def _line(self, y: int) -> Line:
        pieces: list[tuple[str, Style]] = []
        for char, bits, style in zip(self.chars[y], self.bits[y], self.styles[y], strict=True):
            if bits:
                char, style = self._joined(bits), "line"
            if pieces and pieces[-1][1] == style:
                pieces[-1] = (pieces[-1][0] + char, style)
            else:
                pieces.append((char, style))
        while pieces and not isinstance(pieces[-1][1], int) and not pieces[-1][0].strip():
            pieces.pop()
        if pieces and not isinstance(pieces[-1][1], int):
            pieces[-1] = (pieces[-1][0].rstrip(), pieces[-1][1])
        return tuple(pieces)

    def _joined(self, bits: int) -> str:
        if self.box:
            return _BOX[bits]
        if not bits & (UP | DOWN):
            return "-"
        return "|" if not bits & (LEFT | RIGHT) else "+"


def spread(total: int, weights: Sequence[float], least: Sequence[int]) -> list[int]:
    """Lengths that add up to at most `total`, in proportion to `weights` and at least `least`.

    Those of `least` where these are too long already.
    """
    low, high = 0.0, total / max(1e-9, min((w for w in weights if w > 0), default=1.0))
    for _ in range(50):
        middle = (low + high) / 2
        lengths = [max(n, int(middle * w)) for w, n in zip(weights, least, strict=True)]
        low, high = (middle, high) if sum(lengths) <= total else (low, middle)
    return [max(n, int(low * w)) for w, n in zip(weights, least, strict=True)]


def wrapped(text: str, width: int) -> list[str]:
    """Text as lines of at most so many characters; one empty line for an empty text."""
    return textwrap.wrap(text, max(1, width), break_on_hyphens=False, drop_whitespace=True) or [""]
