"""`stages`: how a sum that is pending in a wider dtype moves, and after which step it is rounded.

Once all terms are added, the remaining steps move halves: an all_reduce becomes a reduce_scatter in
float32 and an all_gather of halves, 3/4 of its bytes, where that takes less time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import attrs
import torch

from fdtensor.layouts.placement import Replicate, Shard
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.precision import has_pending_sum, is_sum
from fdtensor.plans.collectives import Step
from fdtensor.plans.cost import CostModel, seconds
from fdtensor.plans.cost_parts import overlapped
from fdtensor.plans.planner import Plan, plan

__all__ = ["middles", "stages"]


@remembered(65536)
def stages(
    src: TensorType, dst: TensorType, wide: torch.dtype, cost: CostModel
) -> tuple[Plan, ...]:
    """The plan in `wide` and, if the value is rounded before `dst`, one in the dtype of `src`.

    `src` and `dst` have a half dtype, and `src` is a pending sum. The value is rounded after the
    first plan. By `cost` the two take the least time.
    """
    terms, end = (attrs.evolve(type, dtype=wide) for type in (src, dst))
    whole = plan(terms, end, cost=cost)
    ways: list[tuple[Plan, ...]] = [(whole,)]
    for middle in middles(whole.steps, end):
        after = plan(src.with_layout(middle.layout), dst, cost=cost)
        ways.append((plan(terms, middle, cost=cost), after))
    visible = overlapped(cost)
    return min(ways, key=lambda way: sum(seconds(s, visible) for part in way for s in part.steps))


def middles(steps: Sequence[Step], end: TensorType) -> Iterator[TensorType]:
    """Types in which the sum may be rounded: after the last step that adds, or cut by its axes.

    There is none where the sum stays pending, or the steps add last.
    """
    last = next((step for step in reversed(steps) if has_pending_sum(step.src.layout)), None)
    if last is None or has_pending_sum(end.layout):
        return
    if last.dst is not end:
        yield last.dst
    mesh = end.mesh
    added = [
        axis
        for axis in mesh.axes
        if is_sum(last.src.layout[axis]) and isinstance(last.dst.layout[axis], Replicate)
    ]
    for dim in range(last.dst.ndim) if added else ():
        if _even(last.dst, dim, prod(mesh.axis_size(axis) for axis in added)):
            layout = last.dst.layout
            for axis in added:
                layout = layout.split(axis, dim)
            if (middle := last.dst.with_layout(layout)) is not end:
                yield middle


def _even(type: TensorType, dim: int, ways: int) -> bool:
    """Whether a dim may be cut into `ways` times as many blocks, all of one size."""
    cuts = type.layout.cuts(dim)
    plain = all(isinstance(type.layout[axis], Shard) for axis in cuts)
    blocks = ways * prod(type.mesh.axis_size(axis) for axis in cuts)
    return plain and type.shape[dim] > 0 and type.shape[dim] % blocks == 0
