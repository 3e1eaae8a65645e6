"""`ReduceScatter`: each rank gets its block of the reduction of all terms."""

from __future__ import annotations

import attrs

from fdtensor.layouts.placement import ReduceOp
from fdtensor.plans.collectives.base import (
    Axes,
    Bundle,
    Change,
    Dims,
    Step,
    axes_fact,
    dims_fact,
    local_numel,
    peers,
    tails,
)
from fdtensor.plans.collectives.even import Call, Even, ascending, is_even
from fdtensor.plans.collectives.exchange import by_exchange
from fdtensor.plans.tiling import Tiling, along, outermost
from fdtensor.plans.wire import in_order

__all__ = ["ReduceScatter"]


@attrs.frozen(eq=False)
class ReduceScatter(Even):
    """Each rank gets its even block of the reduced terms, along `axes[i]` of `dims[i]`.

    `+[A B] +[C D]  ->  [A+C] [B+D]`

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout(partial={"x": "sum"}))
    >>> print(plan(x, mesh.layout("x")))
    f32[4,6]{sum:x} -> f32[4@x,6] on Mesh(x=2)
      reduce_scatter[axis=x dim=0 reduce_op=sum]  f32[4@x,6]  48 B
    1 step, 48 B received per rank
    """

    axes: Axes
    dims: Dims
    reduce_op: ReduceOp

    name = "reduce_scatter"
    change = ("partial", "shard")
    funcol = "reduce_scatter_tensor"
    gives_one, gets_one = False, True
    one_buffer = True

    @classmethod
    def between(cls, change: Change) -> ReduceScatter | None:
        cuts = tails(change, change.dst, change.src)
        if cuts is None or not is_even(change.dst, cuts[1]) or not ascending(change.src.mesh):
            return None
        return cls(*cuts, change.src.type.layout.partial[change.names[0]])

    def facts(self) -> list[str]:
        return [*axes_fact(self.axes), *dims_fact(self.dims), f"reduce_op={self.reduce_op}"]

    def reduction(self) -> ReduceOp:
        return self.reduce_op

    def tilings(self, step: Step, rank: int) -> tuple[Tiling, None]:
        whole = step.src.local_shape(rank)
        return along(step.src.mesh, self.axes, whole, self.dims), None

    def arguments(self, call: Call, wire_op: str) -> tuple[object, ...]:
        return wire_op, call.count, call.group

    def as_exchanges(self, step: Step) -> tuple[Step, ...]:
        return (by_exchange(step.src, step.dst, "all_to_all"),)

    def working_at_once(self, step: Step, rank: int, owned: bool) -> int:
        out, src = local_numel(step.dst, rank), local_numel(step.src, rank)
        packed = 0 if outermost(step.src, rank, self.axes, self.dims) else src
        if in_order(step.src.dtype, self.reduce_op):
            return packed + 2 * src  # the keys, and what flips them
        return out + packed

    def working_in_exchanges(self, step: Step, rank: int) -> int:
        own, given = local_numel(step.dst, rank), local_numel(step.src, rank)
        terms = own * (peers(step.src.mesh, self.axes) + 1)  # the result in place of its own one
        return terms + given - own

    def copied(self, step: Step, moved: int) -> int:
        return 2 * (step.dst.local_nbytes(step.dst.mesh.order[0]) + moved)

    def bundle(self, step: Step) -> Bundle | None:
        return ReduceScatter, self.axes, self.reduce_op, step.src.dtype
