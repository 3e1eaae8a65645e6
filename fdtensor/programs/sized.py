"""`fits` and `kind`: what of a placement depends on the size of its dim.

Blocks that are listed one by one are those of one size: others of the same dim stand for them at
another one.
"""

from __future__ import annotations

from typing import Any

from fdtensor.layouts.placement import Cut, Ragged, Spans
from fdtensor.ops.graph import Full

__all__ = ["LISTED", "fits", "kind"]

LISTED = (Ragged, Spans)
"""The cuts that list where each block ends."""


def fits(p: object, full: Full) -> bool:
    """Whether a placement may be one of a tensor, as blocks that are listed need not."""
    match p:
        case Spans():
            return False
        case Ragged(dim, sizes):
            return sum(sizes) == full.shape[dim]
        case _:
            return True


def kind(p: object) -> Any:
    """A placement without what depends on sizes: of a cut its dim."""
    return (Cut, p.dim) if isinstance(p, Cut) else p
