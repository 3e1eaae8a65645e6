"""`Boundary`: the placements with which values enter and leave a graph, along one axis."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from fdtensor.programs.nodes import Option, Place

__all__ = ["Boundary", "boundary_of"]


@attrs.frozen
class Boundary:
    """The placements of a graph's inputs and outputs on one axis, "free" where they are open."""

    ins: tuple[Place, ...]
    outs: tuple[Place, ...]


def boundary_of(option: Option, read: Sequence[bool]) -> Boundary:
    """The boundary of a decomposition where an axis takes this option of its call."""
    outs = tuple(p for p, is_read in zip(option.outs, read, strict=True) if is_read)
    return Boundary(option.ins, outs)
