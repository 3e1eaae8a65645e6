"""`timeline`: when each line of a program computes or communicates, by a cost model.

Lines run in order on two streams. A collective starts once its operand is there and those before it
have arrived, and is waited for when its result is read.
"""

from __future__ import annotations

import attrs

from fdtensor.ops.graph import Var
from fdtensor.plans.cost import CostModel
from fdtensor.programs.eqn import Eqn
from fdtensor.programs.memory import Lines
from fdtensor.programs.program import Program
from fdtensor.programs.seconds import line_seconds

__all__ = ["Timed", "Timeline", "timeline", "times_of"]


@attrs.frozen
class Timed:
    """A line of a program with the seconds at which it starts and ends.

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((1000,), torch.float32, mesh.layout("x"))
    >>> last = fd.cost.timeline(trace(torch.sum, x, out_layouts=mesh.layout())).lines[-1]
    >>> last.eqn.is_collective, last.start < last.stop
    (True, True)
    """

    eqn: Eqn
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.stop - self.start


@attrs.frozen
class Timeline:
    """The lines of a program, in order, with their times on the busiest rank, in seconds.

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((1000,), torch.float32, mesh.layout("x"))
    >>> times = fd.cost.timeline(trace(torch.sum, x, out_layouts=mesh.layout()))
    >>> times.exposed == times.sending
    True
    """

    lines: tuple[Timed, ...]

    @property
    def seconds(self) -> float:
        """How long the program takes."""
        return max([line.stop for line in self.lines], default=0.0)

    @property
    def computing(self) -> float:
        """How long it computes."""
        return sum(line.seconds for line in self.lines if not line.eqn.is_collective)

    @property
    def sending(self) -> float:
        """How long it communicates."""
        return sum(line.seconds for line in self.lines if line.eqn.is_collective)

    @property
    def exposed(self) -> float:
        """How long it communicates and does not compute."""
        return max(0.0, self.seconds - self.computing)


def timeline(program: Program, cost: CostModel | None = None) -> Timeline:
    """The times of each line of a program by `cost`, or by the cost model that it was made with.

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((1000,), torch.float32, mesh.layout("x"))
    >>> program = trace(torch.sum, x, out_layouts=mesh.layout())
    >>> fd.cost.timeline(program).seconds < fd.cost.timeline(program, fd.cost.GLOO).seconds
    True
    """
    return times_of(program, cost or program.cost)


def times_of(program: Program | Lines, cost: CostModel) -> Timeline:
    """The times of each line of a program, or of what is to be one."""
    clock = link = 0.0
    ready: dict[Var, float] = {}
    times: list[Timed] = []
    for eqn in program.eqns:
        time = line_seconds(program.types, eqn, cost)
        start = max([clock, *(ready.get(v, 0.0) for v in eqn.ins)])
        if eqn.is_collective:
            start = max(start, link)
            link = start + time
            ready.update((v, link) for v in eqn.outs if v is not None)
        else:
            clock = start + time
        times.append(Timed(eqn, start, start + time))
    return Timeline(tuple(times))
