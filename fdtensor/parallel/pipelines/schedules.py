"""`Schedule`: which place runs which stage for which part of a batch, in what order.

`gpipe` (Huang et al., 2019) runs all forwards first. `1f1b` (Narayanan et al.,
2019) begins a backward as soon as there is one, and holds no more parts than it needs to.
`interleaved` (Narayanan et al., 2021) does so with several stages a place. `zero_bubble` is ZB-H1
(Qi et al., 2023): the gradients of weights, for which no other place waits, fill the gaps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, get_args

import attrs

from fdtensor.layouts.display import display
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.words import near

__all__ = ["Action", "Kind", "Schedule", "Slot", "schedule_of"]

Kind = Literal["F", "B", "W"]
"""A forward, a backward, or the gradients of weights where they have a part of their own."""

Named = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]

MOST_PARTS = 2**16
"""Into so many parts a batch is split at most: a schedule lists what is done for each."""


@attrs.frozen(order=True)
class Action:
    """What a place runs at once: the forward or backward of a stage for one part of the batch."""

    kind: Kind
    stage: int
    part: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.part}"

    def needs(self, stages: int) -> Iterator[Action]:
        """What it waits for, the result of another stage first."""
        match self.kind:
            case "F":
                if self.stage:
                    yield attrs.evolve(self, stage=self.stage - 1)
            case "B":
                if self.stage < stages - 1:
                    yield attrs.evolve(self, stage=self.stage + 1)
                yield attrs.evolve(self, kind="F")
            case "W":
                yield attrs.evolve(self, kind="B")

    def sends(self, stages: int) -> bool:
        """Whether another stage reads what it gives."""
        last = {"F": self.stage == stages - 1, "B": not self.stage, "W": True}
        return not last[self.kind]


@attrs.frozen
class Slot:
    """An action with its place and its time, in seconds or in units."""

    action: Action
    place: int
    start: float
    stop: float


Seconds = Callable[[Action], float]
"""How long an action takes, or what it sends."""


@attrs.frozen
class Schedule:
    """What each place runs, in order: data that prints, and that `show` draws."""

    name: str
    places: tuple[int, ...]
    """The place of each stage."""
    parts: int
    """Into how many parts the batch is split."""
    rows: tuple[tuple[Action, ...], ...]
    """The actions of each place, in order."""
    slots: tuple[Slot, ...]
    """The actions with their times, by their starts."""
    in_seconds: bool = False
    """Whether times are seconds; else one is that of a forward."""

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.places)

    @property
    def seconds(self) -> float:
        """How long the whole takes; in units where times are no seconds."""
        return max((slot.stop for slot in self.slots), default=0.0)

    @property
    def bubble(self) -> float:
        """The part of the time of all places in which they wait, 0 to 1."""
        busy = sum(slot.stop - slot.start for slot in self.slots)
        return 1 - busy / (len(self.rows) * self.seconds) if self.seconds else 0.0

    @property
    def in_flight(self) -> tuple[int, ...]:
        """How many results of forwards each place keeps at once at most, for their backwards."""
        ends = "W" if any(a.kind == "W" for row in self.rows for a in row) else "B"
        most: list[int] = []
        for row in self.rows:
            held = [0]
            for action in row:
                held.append(held[-1] + (action.kind == "F") - (action.kind == ends))
            most.append(max(held))
        return tuple(most)

    def timed(self, seconds: Seconds, sending: Seconds) -> Schedule:
        """The same order with the times that actions, and the sending of their results, take."""
        return attrs.evolve(
            self, slots=_timed(self.rows, self.places, seconds, sending), in_seconds=True
        )

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        return display("html", self)


def schedule_of(name: object, places: Sequence[int], parts: int) -> Schedule:
    """The schedule of this name, for stages at these places, in units of the time of a forward.

    A backward takes two units, where that of weights has its own part both take one. Raises
    `TraceError` for a name or numbers that make none.
    """
    _refuse(name, places, parts)
    units: Mapping[Kind, float] = {"F": 1, "B": 1 if name == "zero_bubble" else 2, "W": 1}
    rows = tuple([_row(str(name), place, places, parts) for place in range(1 + max(places))])
    slots = _timed(rows, places, lambda a: units[a.kind], lambda _: 0.0)
    return Schedule(str(name), tuple(places), parts, rows, slots)


def _refuse(name: object, places: Sequence[int], parts: int) -> None:
    if name not in get_args(Named):
        raise TraceError(
            f"schedule={name!r} is no option.",
            hint=f"{near(name, get_args(Named))}Write schedule= one of "
            f"{', '.join(map(repr, get_args(Named)))}.",
        )
    if not isinstance(parts, int) or isinstance(parts, bool) or not 1 <= parts <= MOST_PARTS:
        raise TraceError(
            f"microbatches={parts!r} is no number of parts of a batch.",
            hint=f"Write a whole number, 1 to {MOST_PARTS}; four for each stage keep the bubble "
            "small.",
        )
    count = 1 + max(places)
    if list(places) != [i % count for i in range(len(places))]:
        raise TraceError(
            "the stages of a pipeline go round the meshes.",
            meshes=", ".join(map(str, places)),
            hint="Write meshes=[m0, m1] for two stages, and [m0, m1, m0, m1] for four.",
        )
    if name != "interleaved" and len(places) > count:
        raise TraceError(
            f"{name} has one stage a mesh, not {len(places)} on {count}.",
            hint='Write schedule="interleaved", or one function of the stages of a mesh.',
        )
    if len(places) % count:
        last = len(places) - len(places) % count
        raise TraceError(
            "an interleaved schedule has as many stages on each mesh: not "
            f"{len(places)} on {count}.",
            hint=f"Write {last} stages or {last + count}: put two functions in one, or split one.",
        )
    if name == "interleaved" and parts % count:
        raise TraceError(
            f"an interleaved schedule takes {count} parts at a time, and {parts} are no multiple.",
            hint=f"Write microbatches={-(-parts // count) * count}.",
        )


def _row(name: str, place: int, places: Sequence[int], parts: int) -> tuple[Action, ...]:
    """The order of one place: forwards to begin with, then one for each backward, then the rest."""
    count, own = 1 + max(places), [stage for stage, p in enumerate(places) if p == place]

    def all_of(kind: Kind, chunks: Sequence[int]) -> list[Action]:
        """The actions of a kind, so many parts of one stage in turn as there are places."""
        turns = range(0, parts, count)
        return [
            Action(kind, stage, part)
            for first in turns
            for stage in chunks
            for part in range(first, min(first + count, parts))
        ]

    forwards, backwards = all_of("F", own), all_of("B", own[::-1])
    rounds = len(own) - 1
    warm = {
        "gpipe": len(forwards),
        "interleaved": 2 * (count - place - 1) + rounds * count if rounds else count - place - 1,
    }.get(name, count - place - 1)
    row, rest = forwards[:warm], iter(forwards[warm:])
    late = place if name == "zero_bubble" else None  # weights wait for as many backwards
    for i, backward in enumerate(backwards):
        row += [*itertools.islice(rest, 1), backward]
        if late is not None and i >= late:
            row.append(attrs.evolve(backwards[i - late], kind="W"))
    if late:
        row += [attrs.evolve(a, kind="W") for a in backwards[max(0, len(backwards) - late) :]]
    return tuple(row)


def _timed(
    rows: Sequence[Sequence[Action]], places: Sequence[int], seconds: Seconds, sending: Seconds
) -> tuple[Slot, ...]:
    """The times of actions, each as soon as its place and what it needs are there."""
    stages, done = len(places), dict[Action, Slot]()
    left, free = [list(reversed(row)) for row in rows], [0.0] * len(rows)
    while any(left):
        for place, row in enumerate(left):
            while row and all(n in done for n in row[-1].needs(stages)):
                action, start = row.pop(), free[place]
                for need in action.needs(stages):
                    arrives = done[need].stop
                    arrives += sending(need) if done[need].place != place else 0.0
                    start = max(start, arrives)
                free[place] = start + seconds(action)
                done[action] = Slot(action, place, start, free[place])
    return tuple(sorted(done.values(), key=lambda s: (s.start, s.place, s.action)))


def _lines(schedule: Schedule) -> Iterator[str]:
    """The schedule as text: a line for each place, its actions at their times."""
    count = len(schedule.rows)
    word = "stage" if schedule.stages == 1 else "stages"
    meshes = "mesh" if count == 1 else "meshes"
    yield (
        f"{schedule.name}: {schedule.stages} {word} on {count} {meshes}, "
        f"{schedule.parts} parts, {100 * schedule.bubble:.0f} % of the time waiting"
    )
    names = {slot.action: _name(slot.action, schedule) for slot in schedule.slots}
    width = 1 + max(map(len, names.values()), default=0)
    for place in range(count):
        own = [slot for slot in schedule.slots if slot.place == place]
        if schedule.in_seconds or schedule.seconds > MOST_COLUMNS:
            text = " ".join(names[slot.action] for slot in own)
        else:
            cells = ["."] * int(schedule.seconds)
            for slot in own:
                start, stop = int(slot.start), int(slot.stop)
                cells[start:stop] = [names[slot.action]] + ["-"] * (stop - start - 1)
            text = "".join(f"{cell:<{width}}" for cell in cells).rstrip()
        yield f"  mesh {place}  {text}"


def _name(action: Action, schedule: Schedule) -> str:
    """An action in a row of its place: without its stage where the place has one alone."""
    several = schedule.stages > len(schedule.rows)
    return f"{action.kind}{f'{action.stage}.' if several else ''}{action.part}"


MOST_COLUMNS = 200
"""The most columns of a text with actions at their times."""
