"""The time of a training step when collectives are free: forward and backward, in many ways.

The first step of a way makes whatever it needs, also its process groups and programs, and is timed
once, in the order of the ways: what one has warmed up helps those after it.
"""

from __future__ import annotations

from statistics import median

import attrs

from tests.bench.compute_ways import COMPILED, WAYS, Step, Way
from tests.bench.models import Model
from tests.bench.timing import Counted, interleaved, once, ratio

__all__ = ["StepTimes", "step_times"]


@attrs.frozen
class StepTimes:
    """What a step of a model takes in one way, in microseconds; a median but for the first."""

    model: str
    way: str
    us: float
    first_us: float
    ops: int
    """Calls of aten ops on plain tensors, views too; 0 for compiled code."""
    collectives: int
    to_local: float
    """The median ratio to plain local ops, of the rounds."""


def step_times(model: Model, rounds: int, count: int, compiling: bool = False) -> list[StepTimes]:
    """A training step in every way, `count` steps a loop; one after the other for first steps."""
    ways = {**WAYS, **(COMPILED if compiling else {})}
    steps: dict[str, Step] = {}
    first: dict[str, float] = {}
    for name, way in ways.items():
        made: list[Step] = []

        def start(way: Way = way, made: list[Step] = made) -> None:
            made.append(way(model))
            made[0]()

        first[name] = once(start)
        steps[name] = made[0]
    counts = {
        name: (0, 0) if name in COMPILED else Counted.during(step) for name, step in steps.items()
    }
    taken = interleaved(steps, rounds, count)
    return [
        StepTimes(
            model.name,
            name,
            median(us),
            first[name],
            *counts[name],
            ratio(us, taken["local"]),
        )
        for name, us in taken.items()
    ]
