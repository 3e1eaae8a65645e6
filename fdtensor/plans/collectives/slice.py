"""`Slice`: each rank keeps its block of what it holds."""

from __future__ import annotations

from collections.abc import Hashable

import attrs
import torch

from fdtensor.layouts.blocks import locate
from fdtensor.plans.boxes import cut
from fdtensor.plans.collectives.base import (
    Axes,
    Change,
    Dims,
    OnRank,
    Step,
    World,
    axes_fact,
    dims_fact,
    tails,
)
from fdtensor.plans.collectives.local import Local, common, copy_common
from fdtensor.plans.local_tensors import copied

__all__ = ["Slice"]


@attrs.frozen(eq=False)
class Slice(Local):
    """Each rank keeps its block of dim `dims[i]` along `axes[i]`; outer cuts first.

    `[A B] [A B]  ->  [A] [B]`

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout())
    >>> print(plan(x, mesh.layout("x")))
    f32[4,6] -> f32[4@x,6] on Mesh(x=2)
      slice[axis=x dim=0]  f32[4@x,6]  0 B
    1 step, 0 B received per rank
    """

    axes: Axes
    dims: Dims

    name = "slice"
    change = ("replicate", "shard")
    is_part = True

    @classmethod
    def between(cls, change: Change) -> Slice | None:
        cuts = tails(change, change.dst, change.src)
        return None if cuts is None else cls(*cuts)

    def facts(self) -> list[str]:
        return [*axes_fact(self.axes), *dims_fact(self.dims)]

    def on_block(self, step: Step, rank: int, block: torch.Tensor) -> torch.Tensor:
        shared = common(step, rank)
        if shared.whole:
            assert shared.boxes is not None
            return copied(cut(block, shared.boxes[0])[0][0])
        return copy_common(shared, block, block.new_empty(shared.shape))

    def depends_on(self, step: Step, rank: int) -> Hashable:
        before, after = step.src.mesh.coord(rank), step.dst.mesh.coord(rank)
        return before and after and (step.src.box(before), step.dst.box(after))

    def on_rank(self, step: Step, world: World) -> OnRank:
        if not world.records:
            return super().on_rank(step, world)
        return lambda value, owned: _view(step, world.rank, value)


def _view(step: Step, rank: int, block: torch.Tensor) -> torch.Tensor:
    """A view of the new block where it can be one."""
    shape = step.dst.local_shape(rank)
    if 0 in shape:  # such a block may come from any other
        return block.new_empty(shape)
    before, after = step.src.mesh.coord(rank), step.dst.mesh.coord(rank)
    assert before is not None
    assert after is not None
    boxes = zip(step.src.box(before), step.dst.box(after), strict=True)
    for d, (indices, kept) in enumerate(boxes):
        if indices == kept:
            continue
        runs = locate(indices, kept) if kept else ()
        if len(runs) == 1:
            block = block.narrow(d, runs[0][0], runs[0][1] - runs[0][0])
        elif runs:
            block = torch.cat([block.narrow(d, a, b - a) for a, b in runs], d)
        else:
            block = block.narrow(d, 0, 0)
    return block
