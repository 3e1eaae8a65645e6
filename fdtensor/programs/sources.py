"""`sources`: which module and line each line of a program comes from; `by_module` sums them up."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from fdtensor.ops.graph import Call, Var
from fdtensor.ops.sources import Source
from fdtensor.plans.cost import CostModel
from fdtensor.plans.traffic import most_received
from fdtensor.programs import loops
from fdtensor.programs.names import value_named
from fdtensor.programs.seconds import line_seconds

if TYPE_CHECKING:
    from fdtensor.programs.program import Program

__all__ = ["Share", "by_module", "source_of", "sources"]

NOWHERE = Source()


def sources(program: Program) -> list[Source]:
    """Where each line of a program comes from, in order.

    A move comes from the call that reads its result, or from what computed its operand where it is
    for no call. Programs that were read from JSON have no sources.
    """
    calls: Mapping[Var, Call] = {} if program.origin is None else program.origin.calls
    known: dict[Var, Source] = {}
    every: list[Source] = []
    for eqn in program.eqns:
        outs = [v for v in eqn.outs if v is not None]
        marks: list[Any] = [calls[v].mark for v in outs if v in calls]
        own = next((m for m in marks if isinstance(m, Source)), None)
        if own is None:
            own = next((known[v] for v in eqn.ins if v in known), NOWHERE)
        known.update((v, own) for v in outs)
        every.append(own)
    return every


def source_of(program: Program, value: Var | str) -> Source:
    """Where the line of a value comes from, or of the one of this name."""
    v = value_named(program, str(value))
    lines = zip(program.eqns, sources(program), strict=True)
    return next((source for eqn, source in lines if v in eqn.outs), NOWHERE)


@attrs.frozen
class Share:
    """What the lines of some modules amount to: `layers.*.mlp` of layers 0 to 11."""

    module: str
    times: int
    """How many modules that is."""
    lines: int
    received_bytes: int
    computing: float
    sending: float

    @property
    def name(self) -> str:
        """The path with the number of modules: `layers.*.mlp x12`."""
        return (self.module or "outside of modules") + (f" x{self.times}" * (self.times > 1))

    @property
    def seconds(self) -> float:
        """How long they take, one after the other."""
        return self.computing + self.sending


def by_module(program: Program, most: int = 12, cost: CostModel | None = None) -> list[Share]:
    """The modules of a program in the order of their first lines; equal layers count together.

    Modules inside of others count as parts of these where there would be more than `most`. Seconds
    are those of `cost`, by default of the model that the program was made for. Empty for a program
    without modules.
    """
    every = sources(program)
    if not any(source.module for source in every):
        return []
    parts = [tuple(source.module.split(".")) if source.module else () for source in every]
    depth = max(map(len, parts))
    while depth > 1 and len({_folded(part[:depth]) for part in parts}) > most:
        depth -= 1
    groups: dict[str, list[int]] = {}
    for i, part in enumerate(parts):
        groups.setdefault(_folded(part[:depth]), []).append(i)
    price = cost or program.cost
    repeats = zip(program.eqns, loops.times(program), strict=True)
    seconds = [often * line_seconds(program.types, eqn, price) for eqn, often in repeats]
    shares: list[Share] = []
    for name, some in groups.items():
        times = len({parts[i][:depth] for i in some})
        shares.append(_share(program, name, times, some, seconds))
    return shares


def _folded(part: Sequence[str]) -> str:
    """A path in which the numbers of layers do not count: `layers.*.mlp`."""
    return ".".join("*" if re.fullmatch(r"\d+", name) else name for name in part)


def _share(
    program: Program, name: str, times: int, some: Sequence[int], seconds: Sequence[float]
) -> Share:
    sends = [i for i in some if program.eqns[i].is_collective]
    often = loops.times(program)
    received = sum(often[i] * most_received(program.eqns[i].steps) for i in sends)
    sending = sum(seconds[i] for i in sends)
    computing = sum(seconds[i] for i in some) - sending
    return Share(name, times, len(some), received, computing, sending)
