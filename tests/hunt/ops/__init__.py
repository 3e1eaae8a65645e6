"""The table of ops that programs are made of, by family."""

from __future__ import annotations

from tests.hunt.draw import Op
from tests.hunt.ops import (
    algebra,
    draws,
    indexing,
    inplace,
    mistakes,
    nets,
    pointwise,
    reductions,
    views,
)

__all__ = ["FAMILIES", "MISTAKES", "RANDOM"]

FAMILIES: dict[str, tuple[tuple[Op, ...], int]] = {
    "pointwise": (pointwise.OPS, 5),
    "views": (views.OPS, 6),
    "inplace": (inplace.OPS, 4),
    "indexing": (indexing.OPS, 4),
    "reductions": (reductions.OPS, 4),
    "algebra": (algebra.OPS, 4),
    "nets": (nets.OPS, 3),
}
"""The ops of each family, and how often it is drawn."""

MISTAKES = mistakes.OPS
"""Calls that torch refuses."""

RANDOM = draws.OPS
"""Ops that draw random numbers."""
