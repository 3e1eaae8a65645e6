"""`weakly`: the way to a function that does not keep it, nor what it closes over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any
from weakref import ref

__all__ = ["OWN", "weakly"]

OWN = frozenset({FunctionType, partial})
"""Functions that are objects of their own: methods are new ones each time they are read."""


def weakly(f: Callable[..., Any]) -> Callable[[], Any]:
    """A function that gives `f` for as long as it lives."""
    return ref(f) if f.__class__ in OWN else lambda: f
