"""`AllToAll`: blocks of one dim for blocks of another."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from fdtensor.plans.collectives.base import Axes, Change, Step, axes_fact, local_numel
from fdtensor.plans.collectives.even import Call, Even, ascending, is_even
from fdtensor.plans.normal_type import NormalType
from fdtensor.plans.tiling import Tiling, along, outermost

__all__ = ["AllToAll"]


@attrs.frozen(eq=False)
class AllToAll(Even):
    """Even blocks of `src_dim` along `axes` become even blocks of `dst_dim`.

    `[A B] [C D]  ->  [A / C] [B / D]`

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout("x"))
    >>> print(plan(x, mesh.layout(None, "x")))
    f32[4@x,6] -> f32[4,6@x] on Mesh(x=2)
      all_to_all[axis=x dim=0->1]  f32[4,6@x]  24 B
    1 step, 24 B received per rank
    """

    axes: Axes
    src_dim: int
    dst_dim: int

    name = "all_to_all"
    change = ("shard", "shard")
    funcol = "all_to_all_single"
    gives_one, gets_one = False, False

    @classmethod
    def between(cls, change: Change) -> AllToAll | None:
        """The axes that leave the inner cuts of one dim for those of another, in the same order."""
        a, b = change.src, change.dst
        differ = [d for d in range(len(a.shape)) if a.cuts[d] != b.cuts[d]]
        if len(differ) != 2 or not ascending(a.mesh):
            return None
        i, j = differ if len(a.cuts[differ[0]]) > len(b.cuts[differ[0]]) else differ[::-1]
        lost, gained = _inner_axes(b, a, i), _inner_axes(a, b, j)
        if not lost or lost != gained or not is_even(a, [i]) or not is_even(b, [j]):
            return None
        return cls(tuple(a.mesh.axes[axis] for axis in lost), i, j)

    def facts(self) -> list[str]:
        return [*axes_fact(self.axes), f"dim={self.src_dim}->{self.dst_dim}"]

    def tilings(self, step: Step, rank: int) -> tuple[Tiling, Tiling]:
        mesh, axes = step.src.mesh, self.axes
        before = along(mesh, axes, step.src.local_shape(rank), (self.dst_dim,) * len(axes))
        after = along(mesh, axes, step.dst.local_shape(rank), (self.src_dim,) * len(axes))
        return before, after

    def arguments(self, call: Call, wire_op: str) -> tuple[object, ...]:
        sizes = [call.length // call.count] * call.count
        return sizes, sizes, call.group

    def keeps_operands(self, steps: Sequence[Step]) -> bool:
        src, dims = steps[0].src, (self.dst_dim,) * len(self.axes)
        return len(steps) == 1 and outermost(src, src.mesh.order[0], self.axes, dims)

    def working_at_once(self, step: Step, rank: int, owned: bool) -> int:
        out, src, axes = local_numel(step.dst, rank), local_numel(step.src, rank), self.axes
        packed = 0 if outermost(step.src, rank, axes, (self.dst_dim,) * len(axes)) else src
        landed = 0 if outermost(step.dst, rank, axes, (self.src_dim,) * len(axes)) else out
        return out + max(packed, landed)  # what travels is freed before what arrived is copied

    def copied(self, step: Step, moved: int) -> int:
        return 2 * (step.dst.local_nbytes(step.dst.mesh.order[0]) + moved)


def _inner_axes(outer: NormalType, cut: NormalType, dim: int) -> list[int]:
    """The axes that cut a dim further than in `outer`; none where it is cut otherwise."""
    shorter, longer = outer.cuts[dim], cut.cuts[dim]
    same = longer[: len(shorter)] == shorter
    return [axis for axis, _, _ in longer[len(shorter) :]] if same else []
