"""`Text`: a str whose repr is itself."""

from __future__ import annotations

__all__ = ["Text"]


class Text(str):
    """A text that shows as it is, also where a prompt, a notebook or a list echoes it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
