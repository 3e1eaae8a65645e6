"""`of_schedule`: what the picture of a pipeline says: who runs what when, and who waits."""

from __future__ import annotations

from fdtensor.inspect.pictures.facts import Description, Facts, Lane, Note, Span, Timeline
from fdtensor.parallel.pipelines.schedules import Kind, Schedule, Slot
from fdtensor.plans.text import time_text

__all__ = ["of_schedule"]

NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "W": "gradients of weights"}


def of_schedule(schedule: Schedule) -> Description:
    """The work of each mesh in the course of time, in seconds or in units."""
    title = f"{schedule.name}: {schedule.stages} stages, {schedule.parts} parts of the batch"
    lanes = tuple(
        Lane(
            f"mesh {place}",
            tuple([_span(slot, schedule) for slot in schedule.slots if slot.place == place]),
        )
        for place in range(len(schedule.rows))
    )
    facts = Facts(
        (
            ("time", _time(schedule.seconds, schedule)),
            ("waiting", f"{100 * schedule.bubble:.1f} % of the time of all meshes"),
            ("in flight", ", ".join(map(str, schedule.in_flight)) + " parts at most, by mesh"),
        )
    )
    ends = _time(schedule.seconds, schedule)
    note = Note("F is a forward, B a backward, W gradients of weights, each with its part")
    return Description(title, (facts, Timeline(lanes, schedule.seconds, ends), note))


def _span(slot: Slot, schedule: Schedule) -> Span:
    action = slot.action
    when = f"{_time(slot.start, schedule)} to {_time(slot.stop, schedule)}"
    about = f"{NAMES[action.kind]} of stage {action.stage}, part {action.part}: {when}"
    return Span(slot.start, slot.stop, str(action), about)


def _time(time: float, schedule: Schedule) -> str:
    return time_text(time) if schedule.in_seconds else f"{time:g} units"
