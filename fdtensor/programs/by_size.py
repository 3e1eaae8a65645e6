"""`BySize`: the seconds of moves that differ in the size of the tensor alone, from one search.

`essential` merges the dims that tell nothing, and `least_shape` says which moves are alike.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from math import lcm, prod

import attrs
import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut, Partial, Placement, Shard, StridedShard
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.bound import least_total
from fdtensor.plans.cost import CostModel, seconds
from fdtensor.plans.cost_parts import overlapped, parted
from fdtensor.plans.search import Steps, alternatives, by_owners
from fdtensor.plans.traffic import all_received
from fdtensor.programs.nested import Nested
from fdtensor.programs.nodes import Placements
from fdtensor.programs.rounding import middles

__all__ = ["BySize", "RoundedBySize", "Shape", "enlarged", "essential", "least_shape"]

Shape = tuple[int, ...]

MOST = 1 << 40
"""About how many elements a tensor has of which the bytes are counted, so that none is rounded."""


class _Way:
    """Some steps of a move, of a tensor of any size."""

    def __init__(self, steps: Steps, size: int, cost: CostModel) -> None:
        launches, rates = parted(cost)
        self.steps, self._cost = steps, cost
        self._fixed = sum(seconds(step, launches) for step in steps)
        self._each = sum(seconds(step, rates) for step in steps) / size

    def seconds(self, size: int) -> float:
        """What they take by themselves for a tensor with so many elements."""
        return self._fixed + size * self._each

    def visible(self, size: int) -> float:
        """What they take amid a program."""
        return self._felt + size * self._each

    @functools.cached_property
    def _felt(self) -> float:
        launches, _ = parted(overlapped(self._cost))
        return sum(seconds(step, launches) for step in self.steps)

    @functools.cached_property
    def received(self) -> int:
        """The bytes that all ranks receive, of the tensor of `MOST` elements."""
        return all_received(self.steps)


class BySize:
    """The seconds of the plan between two types, for tensors of any size that move alike.

    All that a plan is compared by is a fixed part and a part in proportion to the size, for each
    of the few ways that there are.
    """

    def __init__(self, src: TensorType, dst: TensorType, cost: CostModel) -> None:
        self._types, self._cost = (src, dst), cost
        self._ways = [
            [[_Way(steps, src.numel, cost) for steps in leg] for leg in legs]
            for legs in alternatives(src, dst)
        ]

    def at(self, size: int) -> float:
        """The seconds for a tensor with so many elements, amid a program."""
        return sum(way.visible(size) for way in self.taken(size))

    def taken(self, size: int) -> Sequence[_Way]:
        """The way that `plan` takes, in its parts."""
        ways = [[min(leg, key=lambda w: w.seconds(size)) for leg in legs] for legs in self._ways]
        best = ways[0] if len(ways) == 1 else min(ways, key=lambda way: _cost_of(way, size))
        received = sum(way.received for way in best) if self._pending else 0
        if received in (0, self._least) or self._by_owners is None:
            return best
        return [self._by_owners] if self._by_owners.received < received else best

    def steps(self, size: int) -> Steps:
        """The steps of the plan, of the tensor of `MOST` elements."""
        return tuple([step for way in self.taken(size) for step in way.steps])

    @functools.cached_property
    def _pending(self) -> bool:
        return any(type.layout.partial for type in self._types)

    @functools.cached_property
    def _least(self) -> int:
        return least_total(*self._types)

    @functools.cached_property
    def _by_owners(self) -> _Way | None:
        steps = by_owners(*self._types)
        return None if steps is None else _Way(steps, self._types[0].numel, self._cost)


def _cost_of(way: Sequence[_Way], size: int) -> tuple[int, float, int]:
    received = sum(part.received for part in way)
    return received, sum(part.seconds(size) for part in way), sum(len(part.steps) for part in way)


class RoundedBySize:
    """The same of a sum that is pending in a `wide` dtype, and rounded where that is best."""

    def __init__(
        self, src: TensorType, dst: TensorType, wide: torch.dtype, cost: CostModel
    ) -> None:
        self._types, self._cost = (src, dst), cost
        self._terms, self._end = (attrs.evolve(type, dtype=wide) for type in (src, dst))
        self._whole = BySize(self._terms, self._end, cost)
        self._parts: dict[TensorType, tuple[BySize, BySize]] = {}

    def at(self, size: int) -> float:
        """The seconds for a tensor with so many elements, amid a program."""
        least = self._whole.at(size)
        for middle in middles(self._whole.steps(size), self._end):
            before, after = self._through(middle)
            least = min(least, before.at(size) + after.at(size))
        return least

    def _through(self, middle: TensorType) -> tuple[BySize, BySize]:
        if middle not in self._parts:
            src, dst = self._types
            after = BySize(src.with_layout(middle.layout), dst, self._cost)
            self._parts[middle] = BySize(self._terms, middle, self._cost), after
        return self._parts[middle]


def enlarged(smallest: Shape) -> Shape:
    """The shape of a tensor that moves alike, of about `MOST` elements."""
    times = max(1, MOST // prod(smallest))
    grows = min(1, len(smallest) - 1)  # of dims in turn plain and cut
    return tuple([n * times if d == grows else n for d, n in enumerate(smallest)])


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
def least_shape(sizes: Shape, mesh: Mesh, src: Placements, dst: Placements) -> Shape | None:
    """The smallest shape of a tensor that moves alike; None where more than bytes may tell.

    Blocks are even then, and what else may tell is whether a dim between those that are cut has
    more than one index: blocks are in one piece or not.
    """
    ends = (*src, *dst)
    cuts = [x for x in ends if isinstance(x, Cut)]
    pending = any(isinstance(x, Partial) for x in ends)
    if not sizes or 0 in sizes or not (cuts or pending):
        return None
    blocks = {x.dim: _blocks(x.dim, mesh, src, dst) for x in cuts}
    if pending and (mesh.ndim > 1 or not cuts):  # what is reduced is cut by any dim that is even
        reached = [d for d, n in enumerate(sizes) if n >= min(mesh.sizes)]
        each = {d: _blocks(d, mesh, src, dst) for d in reached}
        blocks |= {d: n for d, n in each.items() if n > 1}
    for x in cuts:
        if isinstance(x, StridedShard) and mesh.ndim == 1:
            blocks[x.dim] *= x.split_factor
        elif not isinstance(x, Shard):
            return None
    if not blocks or any(sizes[d] % n for d, n in blocks.items()):
        return None
    return tuple([blocks.get(d, min(n, 2)) for d, n in enumerate(sizes)])


def _blocks(dim: int, mesh: Mesh, *ends: Placements) -> int:
    """The least number of indices of a dim that all blocks of it on a way divide evenly.

    Axes that cut no dim of an end may cut any: replicas send a part each, as owners reduce one.
    """
    return lcm(*[prod(_at(dim, mesh.sizes, end)) for end in ends])


def _at(dim: int, sizes: Sequence[int], end: Placements) -> Iterator[int]:
    """The sizes of the axes that cut a dim, or none."""
    for n, placement in zip(sizes, end, strict=True):
        if not isinstance(placement, Cut) or placement.dim == dim:
            yield n
