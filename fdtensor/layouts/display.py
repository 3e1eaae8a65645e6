"""`display`: what a value shows of itself, drawn by a room above that of the value."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar

__all__ = ["Kind", "display", "displays", "shell"]

F = TypeVar("F", bound=Callable[..., Any])
Kind = Literal["html", "explanation", "graph_module"]

_DISPLAYS: dict[str, Callable[..., Any]] = {}


def displays(kind: Kind) -> Callable[[F], F]:
    """A decorator: the function that shows values in this way. `fdtensor.inspect` has them all."""

    def register(f: F) -> F:
        _DISPLAYS[kind] = f
        return f

    return register


def display(kind: Kind, value: Any, *args: Any) -> Any:
    """The display of a value by the registered function of this kind."""
    return _DISPLAYS[kind](value, *args)


def shell() -> Any:
    """The IPython that runs, which has a `kernel` in a notebook; None outside of IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
