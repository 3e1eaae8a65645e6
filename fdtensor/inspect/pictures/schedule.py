"""`scheduled`: when each line of a program computes or communicates, by a cost model.

Lines run in order. A named collective starts once its operand is there and is waited for when its
result is read; what is sent goes one after the other. Exchanges run where they stand.
"""

from __future__ import annotations

import attrs

from fdtensor.ops.graph import Var
from fdtensor.plans.collectives import Exchange
from fdtensor.plans.cost import CostModel
from fdtensor.programs.program import Eqn, Program
from fdtensor.programs.seconds import line_seconds

__all__ = ["Timed", "scheduled"]


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
        time = line_seconds(program.types, eqn, cost)
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
