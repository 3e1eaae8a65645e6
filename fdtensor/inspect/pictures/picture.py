"""`Picture`: a description that prints as text, shows as HTML, and is saved as a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import attrs

from fdtensor.inspect.pictures.facts import Description, owners
from fdtensor.inspect.pictures.page import drawing, fragment, page
from fdtensor.inspect.pictures.palette import color, ink
from fdtensor.inspect.pictures.text import plain, text_lines
from fdtensor.layouts.display import shell
from fdtensor.layouts.errors import FdtensorError

__all__ = ["Picture"]

COLUMNS = 100

_STYLES = {
    "title": "bold", "strong": "bold", "name": "bold", "marked": "bold", "label": "bold",
    "muted": "dim", "bar": "cyan", "lane": "cyan", "line": "dim",
}  # fmt: skip


@attrs.frozen(repr=False)
class Picture:
    """The result of `show`: text that prints, HTML in a notebook, a file where it is saved."""

    description: Description

    def text(self, width: int = COLUMNS) -> str:
        """The picture as plain ASCII text of at most so many columns, 40 or more."""
        return plain(text_lines(self.description, width))

    @property
    def html(self) -> str:
        """The picture as one HTML element, for a page or a notebook."""
        return fragment(self.description)

    @property
    def svg(self) -> str:
        """The picture as an SVG file."""
        return drawing(self.description)

    def draw(self) -> None:
        """Draws the picture: HTML in a notebook, colors in a terminal, plain text elsewhere.

        Among the processes of torchrun the first one alone draws.
        """
        if os.environ.get("RANK", "0") != "0":
            return
        if hasattr(shell(), "kernel"):
            sys.modules["IPython"].display.display(self)
            return
        from rich.console import Console

        console = Console()
        if console.is_terminal:
            console.print(self)
        else:
            print(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture to a file that ends with `.html`, `.svg` or `.txt`."""
        target = Path(path)
        match target.suffix.lower():
            case ".html" | ".htm":
                text = page(self.description)
            case ".svg":
                text = self.svg
            case ".txt":
                text = self.text() + "\n"
            case other:
                raise FdtensorError(
                    f"a picture cannot be saved as {other or 'a file without an ending'!r}.",
                    path=target,
                    hint="End the path with .html, .svg or .txt.",
                )
        target.write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.html

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        # pages that show no HTML of others, GitHub's among them, show the SVG
        return {"text/plain": self.text(), "text/html": self.html, "image/svg+xml": self.svg}

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        colors = owners(self.description.sections)
        box = console.encoding.lower().startswith("utf")
        for line in text_lines(self.description, options.max_width, box):
            text = Text(no_wrap=True, overflow="crop")
            for piece, style in line:
                if isinstance(style, int):
                    text.append(piece, f"{ink(colors[style])} on {color(colors[style])}")
                else:
                    text.append(piece, _STYLES.get(style, ""))
            yield text
