"""`small_values`: the values that are whole on every rank only since they are small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from fdtensor.layouts.placement import Cut, Placement, Replicate
from fdtensor.ops.graph import Var
from fdtensor.programs.as_if import dearer
from fdtensor.programs.assembly import Origin
from fdtensor.programs.choice import prices_of
from fdtensor.programs.program import Program
from fdtensor.programs.solver import MANY
from fdtensor.programs.together import chosen_together

__all__ = ["small_values"]

LARGER = 1e4
"""How many times the bytes and flops of tensors count that are no longer small."""


def small_values(program: Program) -> dict[str, list[Var]]:
    """The values, by axis, that the axis would cut if bytes and flops outweighed latencies.

    They are replicated along it, since to gather small tensors and to compute everything everywhere
    takes less time than to wait for messages. None of large graphs, which are not chosen anew.
    """
    origin: Origin = program.origin
    choices = origin.choices
    if origin.constraints.follow or origin.repeats is not None or len(origin.graph.calls) >= MANY:
        return {}
    first = next(iter(choices.values())).problem
    assert first is not None
    prices = first.prices.prices
    larger = dearer(prices.cost, LARGER)
    constraints = attrs.evolve(first.constraints, holding=0.0)
    known = prices_of(origin.graph, program.mesh, larger, constraints)
    boundaries = {a: c.problem.boundary for a, c in choices.items() if c.problem is not None}
    others = chosen_together(origin.graph, boundaries, known, constraints, regather=origin.regather)
    each = {axis: list(_whole(origin, axis, others[axis].placements)) for axis in choices}
    return {axis: values for axis, values in each.items() if values}


def _whole(origin: Origin, axis: str, others: Mapping[Var, Placement]) -> Iterator[Var]:
    """The values of the program that an axis cuts in `others` alone."""
    placements = origin.choices[axis].placements
    for call in origin.graph.calls:
        for v in call.outs:
            if v is None or v not in origin.values:
                continue
            if isinstance(placements[v], Replicate) and isinstance(others[v], Cut):
                yield origin.values[v]
