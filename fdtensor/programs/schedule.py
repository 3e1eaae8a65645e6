"""`scheduled`: the lines of a program in an order in which little communication is waited for.

Lines are listed as two streams would take them, one that computes and one that communicates ("list
scheduling", Graham, 1966). A collective goes before those that the end waits for less; a line that
computes may go some lines before its turn while others wait for what is sent. What inputs are
gathered to is asked for so late that it arrives when it is read, where memory allows.
"""

from __future__ import annotations

import attrs

from fdtensor.plans.cost import CostModel
from fdtensor.programs.listing import Listing, Priority
from fdtensor.programs.memory import Lines, bytes_held, lines_of, local_bytes
from fdtensor.programs.program import Program
from fdtensor.programs.timeline import times_of

__all__ = ["in_time", "scheduled"]

TRIED: tuple[tuple[int, Priority, Priority], ...] = (
    *[(window, "turn", "need") for window in (1, 16, 256)],
    *[(window, "need", "need") for window in (4, 64)],
    *[(window, "turn", "turn") for window in (1, 16)],  # what is reduced at once is freed
)
"""The orders that are tried: how many lines early a line may compute, and which one goes first of
those that could compute and of those that could send."""

WORTH = 1e-3
"""The part of the seconds that another order must save."""

ROOM, LARGEST = 0.05, 2
"""How much more may be held than in the first order: a part of that, and so many times the largest
value that is gathered."""


def scheduled(program: Program) -> Program:
    """The program in the order that takes the least seconds by its timeline, of those tried.

    It may hold two gathered values more at once than in the order of the function, as FSDP does
    that gathers what the next layer needs, and beyond that a part of what that order holds, unless
    it gathers again to hold less.
    """
    lines = lines_of(program, tuple(program.mesh.order[:1]))
    sent = [step for eqn in lines.eqns if eqn.is_collective for step in eqn.steps]
    if not sent:
        return program
    gathered = [step.dst for step in sent if not step.moves.reduced]
    largest = max([int(local_bytes(type, lines.ranks)[0]) for type in gathered], default=0)
    room = 0.0 if program.origin is not None and program.origin.regather else ROOM
    most = int((1 + room) * bytes_held(lines).max()) + LARGEST * largest
    return attrs.evolve(program, eqns=in_time(lines, most, program.cost).eqns)


def in_time(lines: Lines, max_bytes: int, cost: CostModel) -> Lines:
    """The lines in the order of least seconds, of those tried that hold at most `max_bytes`."""
    times = times_of(lines, cost)
    best, least = lines, times.seconds
    ideal = max(times.computing, times.sending)
    listing = Listing(lines, cost, max_bytes)
    for window, compute, send in TRIED:
        if least <= ideal * (1 + WORTH):
            break
        order = listing.order(window, compute, send)
        other = attrs.evolve(lines, eqns=tuple(lines.eqns[i] for i in order))
        time = times_of(other, cost).seconds
        if time < least * (1 - WORTH) and bytes_held(other).max() <= max_bytes:
            best, least = other, time
    return best
