"""`shown`: a function of DTensors, as errors show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["shown"]


def shown(f: Callable[..., Any]) -> str:
    """The text of the function of DTensors that is made of `f`: `spmd('loss')`."""
    return f"spmd({getattr(f, '__name__', f)!r})"
