"""`Picture`: a description that prints as text and shows as HTML; how it is seen just once."""

from __future__ import annotations

import dis
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import attrs

from fdtensor.inspect.pictures.facts import Description, owners
from fdtensor.inspect.pictures.page import drawing, fragment, page
from fdtensor.inspect.pictures.palette import color, ink
from fdtensor.inspect.pictures.text import plain, text_lines
from fdtensor.layouts.errors import FdtensorError

__all__ = ["Picture", "fate", "seen"]

COLUMNS = 100

_STYLES = {
    "title": "bold", "strong": "bold", "name": "bold", "marked": "bold", "label": "bold",
    "muted": "dim", "bar": "cyan", "lane": "cyan", "line": "dim",
}  # fmt: skip


@attrs.frozen(repr=False)
class Picture:
    """What `show` returns: text in a terminal, HTML in a notebook, a file where it is saved."""

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
        return {"text/plain": self.text(), "text/html": self.html}

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


Fate = Literal["dropped", "echoed", "kept"]


def fate(frame: FrameType) -> Fate:
    """What the caller in `frame` does with the result of the call that it is in.

    It drops the value of a statement of its own, unless the line was typed at a prompt, which
    echoes it; anything else keeps it.
    """
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset <= frame.f_lasti or instruction.opname == "CACHE":
            continue
        if instruction.opname == "POP_TOP":
            return "dropped"
        if instruction.opname == "PRINT_EXPR" or instruction.argrepr == "INTRINSIC_PRINT":
            return "echoed"
        break
    return "kept"


def seen(picture: Picture, fate: Fate) -> Picture | None:
    """The picture, shown where the caller would not see it otherwise; None once a prompt has it.

    Among the processes of torchrun the first one shows it.
    """
    if fate == "kept":
        return picture
    if fate == "echoed" and _quiet():
        fate = "dropped"
    if fate == "echoed" and not _at_terminal():
        return picture
    if os.environ.get("RANK", "0") == "0":
        _draw(picture)
    return None if fate == "echoed" else picture


def _shell() -> Any:
    """The IPython that runs, or None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def _quiet() -> bool:
    """Whether IPython echoes nothing, since the line ends with a semicolon."""
    quiet = getattr(sys.displayhook, "quiet", None)
    return quiet is not None and bool(quiet())


def _at_terminal() -> bool:
    """Whether a prompt echoes to a terminal: that of Python, or of IPython without a kernel."""
    return sys.stdout.isatty() and not hasattr(_shell(), "kernel")


def _draw(picture: Picture) -> None:
    if hasattr(_shell(), "kernel"):
        sys.modules["IPython"].display.display(picture)
        return
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(picture)
    else:
        print(picture)
