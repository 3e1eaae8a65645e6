"""`timeline`: when each line of a program computes or communicates, by a cost model.

Lines run in order on two streams. A collective starts once its operand is there and those before it
have arrived, and is waited for when its result is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from operator import add

import attrs

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.words import shown
from fdtensor.plans.cost import CostModel, model_of
from fdtensor.programs.chrome import save
from fdtensor.programs.eqn import Eqn
from fdtensor.programs.loops import times
from fdtensor.programs.program import Program
from fdtensor.programs.seconds import line_seconds
from fdtensor.programs.sources import sources

__all__ = ["Timed", "Timeline", "operands_of", "starts", "timeline"]


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
    program: Program = attrs.field(repr=False)

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

    @named_arguments
    def save(
        self, path: str | os.PathLike[str], beside: str | os.PathLike[str] | None = None
    ) -> None:
        """Writes it to a file that Perfetto (ui.perfetto.dev), Chrome and TensorBoard show.

        `beside` is a file that `torch.profiler` exported while the program ran on a real mesh: what
        was measured is written too, and its last run begins when the estimate does. Files that end
        in `.gz` are compressed. Raises `TraceError` where `beside` has no run of the program.

        >>> import tempfile
        >>> mesh = Mesh(x=2)
        >>> x = TensorType((1000,), torch.float32, mesh.layout("x"))
        >>> times = fd.cost.timeline(trace(torch.sum, x, out_layouts=mesh.layout()))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     times.save(f"{folder}/sum.json")
        """
        save(path, self.program.name, self.lines, sources(self.program), beside)


@named_arguments
def timeline(program: Program, cost: CostModel | None = None) -> Timeline:
    """The times of each line of a program by `cost`, or by the cost model that it was made with.

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((1000,), torch.float32, mesh.layout("x"))
    >>> program = trace(torch.sum, x, out_layouts=mesh.layout())
    >>> fd.cost.timeline(program).seconds < fd.cost.timeline(program, fd.cost.GLOO).seconds
    True
    """
    _check_program(program)
    eqns, price = program.eqns, program.cost if cost is None else model_of(cost)
    pairs = zip(eqns, times(program), strict=True)  # all steps of a line of a loop at once
    seconds = [often * line_seconds(program.types, eqn, price) for eqn, often in pairs]
    sends = [eqn.is_collective for eqn in eqns]
    begins = starts(range(len(eqns)), seconds, sends, operands_of(eqns))
    return Timeline(tuple(map(Timed, eqns, begins, map(add, begins, seconds))), program)


def _check_program(value: object) -> None:
    if not isinstance(value, Program):
        raise TraceError(
            f"{shown(value)} is no program, so it has no lines.",
            hint="Write timeline(trace(f, *types)); plan.seconds is the time of a plan.",
        )


def operands_of(eqns: Sequence[Eqn]) -> list[list[int]]:
    """For each line those whose results it reads, by their numbers."""
    maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outs if v is not None}
    return [sorted({maker[v] for v in eqn.ins if v in maker}) for eqn in eqns]


def starts(
    order: Iterable[int],
    seconds: Sequence[float],
    sends: Sequence[bool],
    operands: Sequence[Sequence[int]],
) -> list[float]:
    """The time at which each line starts, in this order on two streams."""
    clock = link = 0.0
    begins, stops = [0.0] * len(seconds), [0.0] * len(seconds)
    for i in order:
        begin = max([clock, *[stops[j] for j in operands[i]]])
        if sends[i]:
            begin = max(begin, link)
            link = begin + seconds[i]
        else:
            clock = begin + seconds[i]
        begins[i], stops[i] = begin, begin + seconds[i]
    return begins
