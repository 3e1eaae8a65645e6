"""`scheduled`: when each line of a program computes or communicates, by a cost model.

Lines run in order. A named collective starts once its operand is there and is waited for when its
result is read; what is sent goes one after the other. Exchanges run where they stand.
"""

from __future__ import annotations

from math import prod

import attrs
import torch

from fdtensor.inspect.pictures.holders import most_nbytes
from fdtensor.layouts.placement import Cut
from fdtensor.ops.flops import flops
from fdtensor.ops.graph import Full, Var
from fdtensor.ops.rows import CallKey
from fdtensor.plans.collectives import Exchange
from fdtensor.plans.cost import CostModel, seconds
from fdtensor.programs.program import Eqn, Program, is_view_line

__all__ = ["Timed", "line_seconds", "scheduled"]


@attrs.frozen
class Timed:
    """A line of a program with the seconds at which it starts and ends."""

    eqn: Eqn
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.stop - self.start


def scheduled(program: Program, cost: CostModel) -> list[Timed]:
    """The lines of a program, in order, with their times on the busiest rank."""
    clock = link = 0.0
    ready: dict[Var, float] = {}
    times = []
    for eqn in program.eqns:
        time = line_seconds(program, eqn, cost)
        start = max([clock, *(ready.get(v, 0.0) for v in eqn.ins)])
        if eqn.is_collective:
            start = max(start, link)
            link = start + time
            ready.update((v, link) for v in eqn.outs if v is not None)
            if any(isinstance(step.collective, Exchange) for step in eqn.steps):
                clock = link
        else:
            clock = start + time
        times.append(Timed(eqn, start, start + time))
    return times


def line_seconds(program: Program, eqn: Eqn, cost: CostModel) -> float:
    """The seconds of a line: of its steps, or of the flops and bytes of the largest blocks."""
    if eqn.steps:
        return sum(seconds(step, cost) for step in eqn.steps)
    if is_view_line(eqn) or eqn.op is torch.ops.aten._unsafe_view.default:
        return 0.0
    call = eqn.call
    ins = [program.type_of(v) for v in call.ins]
    outs = [None if v is None else program.type_of(v) for v in call.outs]
    types = [type for type in (*ins, *outs) if type is not None]
    cutting = {
        axis
        for type in types
        for axis, placement in zip(type.mesh.axes, type.layout.placements, strict=True)
        if isinstance(placement, Cut)
    }
    ways = prod(program.mesh.axis_size(axis) for axis in cutting)
    fulls = tuple(Full(type.shape, type.dtype) for type in ins)
    results = tuple(None if type is None else Full(type.shape, type.dtype) for type in outs)
    count = flops(CallKey.of(call), fulls, results)
    return sum(map(most_nbytes, types)) / cost.copy + count / ways / cost.flops
