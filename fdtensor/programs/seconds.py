"""`line_seconds`: what a line of a program takes on the busiest rank, by a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fdtensor.layouts.placement import Cut
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.flops import flops
from fdtensor.ops.graph import Full
from fdtensor.ops.loop_ops import ENTRY, LOOP_OPS, WITH_ENTRY
from fdtensor.ops.rows import CallKey
from fdtensor.plans.cost import LOCAL, CostModel, seconds
from fdtensor.programs.eqn import Eqn, is_view_line

__all__ = ["line_seconds"]


def line_seconds(types: Sequence[TensorType], eqn: Eqn, cost: CostModel) -> float:
    """The seconds of a line: of its steps, or of the flops and bytes of a rank's blocks.

    `types` has the type of each value.
    """
    if eqn.steps:
        return sum(seconds(step, cost) for step in eqn.steps)
    if is_view_line(eqn) or eqn.op in (ENTRY, *LOOP_OPS):
        return 0.0
    if eqn.op is WITH_ENTRY:  # one entry is read, and written
        return 2 * most_nbytes(types[eqn.ins[1].index]) / cost.copy
    call = eqn.call
    ins = [types[v.index] for v in call.ins]
    outs = [None if v is None else types[v.index] for v in call.outs]
    return _call_seconds(CallKey.of(call), tuple(ins), tuple(outs), cost)


@remembered(1 << 16)
def _call_seconds(
    key: CallKey,
    ins: tuple[TensorType, ...],
    outs: tuple[TensorType | None, ...],
    cost: CostModel,
) -> float:
    types = [type for type in (*ins, *outs) if type is not None]
    cutting = {
        axis
        for type in types
        for axis, placement in zip(type.mesh.axes, type.layout.placements, strict=True)
        if isinstance(placement, Cut)
    }
    moved = sum(map(most_nbytes, types)) / cost.copy + dict(cost.launch).get(LOCAL, 0.0)
    if not ins:
        return moved
    ways = prod(ins[0].mesh.axis_size(axis) for axis in cutting)
    fulls = tuple(Full(type.shape, type.dtype) for type in ins)
    results = tuple(None if type is None else Full(type.shape, type.dtype) for type in outs)
    return moved + flops(key, fulls, results) / ways / cost.flops_of(ins[0].dtype)


def most_nbytes(type: TensorType) -> int:
    """The bytes of the largest block, but for ragged cuts, of which it is that of the first."""
    return type.local_nbytes(type.mesh.order[0])
