"""Examples of docstrings as blocks of code: Markdown would read what they print as its own."""

import re
from typing import Any

import griffe

__all__ = ["Examples", "fenced"]

EXAMPLE = re.compile(r"^>>> .*(?:\n.*\S.*|\n(?=\n>>> ))*", re.MULTILINE)


def fenced(text: str) -> str:
    """The text with fences around its examples: lines from a `>>>` to the end of a paragraph."""
    return EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", text)


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
