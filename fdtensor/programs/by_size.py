"""`BySize`: the seconds of moves that differ in the size of the tensor alone, with few plans.

`essential` merges the dims that tell nothing, and `least_shape` says which moves are alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from math import prod

import attrs

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut, Partial, Placement, Shard, StridedShard
from fdtensor.layouts.remembered import remembered
from fdtensor.programs.nested import Nested
from fdtensor.programs.nodes import Placements

__all__ = ["BySize", "Line", "Shape", "essential", "least_shape"]

Shape = tuple[int, ...]

DIGITS = 12
"""The significant digits that are kept: lines of the same plan are then equal."""

MOST = 1 << 44
"""About how many elements the largest tensor has."""


def _rounded(x: float) -> float:
    return float(f"{x:.{DIGITS}g}")


@attrs.frozen
class Line:
    """What a plan takes for a tensor of any size: `fixed + size * each`."""

    fixed: float = attrs.field(converter=_rounded)
    each: float = attrs.field(converter=_rounded)

    def at(self, size: int) -> float:
        """The seconds at a size."""
        return self.fixed + size * self.each


class BySize:
    """The lines of the fastest plans at some sizes.

    Where the same line is the least of all at two sizes, it is so at each size between them, which
    then takes no plan: the least of several lines is concave. What is returned does not depend on
    the sizes asked before, so that ranks choose alike.
    """

    def __init__(self, smallest: Shape) -> None:
        self._smallest = smallest
        self._times: list[int] = []
        """How many times as large the tensors are whose lines are known, ascending."""
        self._lines: dict[int, Line] = {}

    def at(self, size: int, line: Callable[[Shape], Line]) -> float:
        """The seconds of a tensor with so many elements; `line` says that of a shape."""
        smallest, known = prod(self._smallest), self._times
        times = -(-size // smallest)
        if known and not known[0] <= times <= known[-1]:
            self._line(max(1, MOST // smallest) if times > known[-1] else 1, line)
        i = bisect_left(self._times, times)
        around = [self._lines[t] for t in self._times[max(i - 1, 0) : i + 1]]
        if len(around) == 2 and around[0] == around[1]:
            return around[0].at(size)
        return self._line(times, line).at(size)

    def _line(self, times: int, line: Callable[[Shape], Line]) -> Line:
        """The line of a tensor that is so many times as large as the smallest."""
        if times not in self._lines:
            grows = min(1, len(self._smallest) - 1)  # of dims in turn plain and cut
            shape = [n * times if d == grows else n for d, n in enumerate(self._smallest)]
            self._lines[times] = line(tuple(shape))
            self._times = sorted(self._lines)
        return self._lines[times]


@remembered(65536)
def essential(
    shape: Shape, mesh: Mesh, src: Placements, dst: Placements
) -> tuple[Shape, Placements, Placements]:
    """The same move of a tensor with fewer dims: those between the cut ones are merged."""
    dims = sorted({x.dim for x in (*src, *dst) if isinstance(x, Cut)})
    if any(isinstance(x, Partial) for x in (*src, *dst)) and all(n % mesh.size for n in shape):
        return shape, src, dst  # what is pending is reduced in blocks of a dim, here uneven ones
    sizes: list[int] = []
    start = 0
    for d in dims:
        sizes += [prod(shape[start:d]), shape[d]]
        start = d + 1
    sizes.append(prod(shape[start:]))

    def moved(x: Placement) -> Placement:
        return attrs.evolve(x, dim=1 + 2 * dims.index(x.dim)) if isinstance(x, Cut) else x

    def placed(x: Placements) -> Placements:
        each = tuple(map(moved, x))
        if not isinstance(x, Nested):
            return each
        return Nested(each, tuple([(1 + 2 * dims.index(d), axes) for d, axes in x.order]))

    return tuple(sizes), placed(src), placed(dst)


@remembered(65536)
def least_shape(sizes: Shape, mesh: Mesh, ends: tuple[Placement, ...]) -> Shape | None:
    """The smallest shape of a tensor that moves alike; None where more than bytes may tell.

    Blocks are even then, and what else may tell is whether a dim between those that are cut has
    more than one index: blocks are in one piece or not.
    """
    cuts = [x for x in ends if isinstance(x, Cut)]
    pending = any(isinstance(x, Partial) for x in ends)
    if not sizes or 0 in sizes or not (cuts or pending):
        return None
    blocks = {x.dim: mesh.size for x in cuts}
    if pending and (mesh.ndim > 1 or not cuts):  # what is reduced is cut by any dim that is even
        blocks |= {d: mesh.size for d, n in enumerate(sizes) if n >= min(mesh.sizes)}
    for x in cuts:
        if isinstance(x, StridedShard) and mesh.ndim == 1:
            blocks[x.dim] *= x.split_factor
        elif not isinstance(x, Shard):
            return None
    if not blocks or any(sizes[d] % n for d, n in blocks.items()):
        return None
    return tuple([blocks.get(d, min(n, 2)) for d, n in enumerate(sizes)])
