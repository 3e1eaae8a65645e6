"""`AllGather`: every rank gets the blocks of all."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from fdtensor.plans.collectives.base import (
    Axes,
    Bundle,
    Change,
    Dims,
    Step,
    axes_fact,
    dims_fact,
    local_numel,
    tails,
)
from fdtensor.plans.collectives.even import Call, Even, ascending, is_even
from fdtensor.plans.tiling import Tiling, along, outermost

__all__ = ["AllGather"]


@attrs.frozen(eq=False)
class AllGather(Even):
    """Every rank gets the blocks that even cuts of `dims[i]` along `axes[i]` made.

    `[A] [B]  ->  [A B] [A B]`

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout("x"))
    >>> print(plan(x, mesh.layout()))
    f32[4@x,6] -> f32[4,6] on Mesh(x=2)
      all_gather[axis=x dim=0]  f32[4,6]  48 B
    1 step, 48 B received per rank
    """

    axes: Axes
    dims: Dims

    name = "all_gather"
    change = ("shard", "replicate")
    funcol = "all_gather_into_tensor"
    gives_one, gets_one = True, False

    @classmethod
    def between(cls, change: Change) -> AllGather | None:
        cuts = tails(change, change.src, change.dst)
        if cuts is None or not is_even(change.src, cuts[1]) or not ascending(change.src.mesh):
            return None
        return cls(*cuts)

    def facts(self) -> list[str]:
        return [*axes_fact(self.axes), *dims_fact(self.dims)]

    def tilings(self, step: Step, rank: int) -> tuple[None, Tiling]:
        whole = step.dst.local_shape(rank)
        return None, along(step.src.mesh, self.axes, whole, self.dims)

    def arguments(self, call: Call, wire_op: str) -> tuple[object, ...]:
        return call.count, call.group

    def keeps_operands(self, steps: Sequence[Step]) -> bool:
        return len(steps) == 1

    def working_at_once(self, step: Step, rank: int, owned: bool) -> int:
        out = local_numel(step.dst, rank)
        return out if outermost(step.dst, rank, self.axes, self.dims) else 2 * out

    def copied(self, step: Step, moved: int) -> int:
        rank = step.dst.mesh.order[0]
        in_order = outermost(step.dst, rank, self.axes, self.dims)
        return 0 if in_order else 2 * step.dst.local_nbytes(rank)

    def bundle(self, step: Step) -> Bundle | None:
        return AllGather, self.axes, step.src.dtype
