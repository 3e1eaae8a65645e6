"""How much of each law a run tries: a little, or with `--deep` all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["go_deep", "is_deep", "spread", "times"]

_GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole part, are spread as evenly as can be."""


_depth = {"deep": False}


def go_deep(deep: bool) -> None:
    """Sets whether this run tries every law at length; the options of the run say it once."""
    _depth["deep"] = deep


def is_deep() -> bool:
    """Whether this run tries every law at length, as one before a release does."""
    return _depth["deep"]


def times(count: int, deep: int) -> int:
    """How often something is tried: `count` times, or `deep` times in a deep run."""
    return deep if is_deep() else count


def spread(cases: Sequence[Any], count: int) -> list[Any]:
    """`count` of the cases, always the same, all over the list and in step with no period of it."""
    order = sorted(range(len(cases)), key=lambda i: i * _GOLDEN % 1)
    return [cases[i] for i in sorted(order[:count])]
