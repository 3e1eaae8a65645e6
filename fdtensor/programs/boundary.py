"""`Boundary`: the placements with which values enter and leave a graph, along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

from fdtensor.layouts.placement import Placement
from fdtensor.programs.solver import Option

__all__ = ["Boundary", "Free", "boundary_of"]

Free = Literal["free"]
"""For a result: any placement but a pending one. For an operand: no call reads it."""


@attrs.frozen
class Boundary:
    """The placements of a graph's inputs and outputs on one axis, "free" where they are open."""

    ins: tuple[Placement | Free, ...]
    outs: tuple[Placement | Free, ...]


def boundary_of(option: Option, read: Sequence[bool]) -> Boundary:
    """The boundary of a decomposition where an axis takes this option of its call."""
    outs = tuple(p for p, is_read in zip(option.outs, read, strict=True) if is_read)
    return Boundary(option.ins, outs)  # type: ignore[arg-type]
