"""`weakly`: the way to a function that does not keep it, nor what it closes over."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any
from weakref import ref

from fdtensor.programs.recording import name_of

__all__ = ["OWN", "Around", "weakly"]

OWN = frozenset({FunctionType, partial})
"""Functions that are objects of their own: methods are new ones each time they are read."""


class Around:
    """A function that `wrap` makes of another one, which it does not keep."""

    def __init__(self, f: Callable[..., Any], wrap: Callable[[Any], Any], name: str = "") -> None:
        self._f, self._wrap = weakly(f), wrap
        self.__name__ = name or name_of(f)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._f())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kept()(*args, **kwargs)

    def kept(self) -> Any:
        """The function, as one that keeps what it is made of."""
        return self._wrap(self._f())


def weakly(f: Callable[..., Any]) -> Callable[[], Any]:
    """A function that gives `f` for as long as it lives."""
    if isinstance(f, Around):
        return f.kept
    return ref(f) if f.__class__ in OWN else lambda: f
