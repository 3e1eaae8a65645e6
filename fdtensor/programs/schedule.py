"""`scheduled`: the lines of a program in an order in which little communication is waited for.

Lines are listed as two streams would take them, one that computes and one that communicates ("list
scheduling", Graham, 1966). A collective goes before those that the end waits for less; a line that
computes may go some lines before its turn while others wait for what is sent. What inputs are
gathered to is asked for so late that it arrives when it is read, where memory allows.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from fdtensor.plans.cost import CostModel
from fdtensor.programs.listing import Listing, Way
from fdtensor.programs.loops import has_loops
from fdtensor.programs.memory import Lines, bytes_held, lines_of, local_bytes
from fdtensor.programs.program import Program
from fdtensor.programs.seconds import line_seconds

__all__ = ["in_time", "scheduled"]

TRIED = (
    *[Way(window) for window in (1, 16, 256)],
    *[Way(window, soon=True) for window in (1, 16, 256)],
    *[Way(window, compute="need") for window in (4, 64)],
    *[Way(window, send="turn") for window in (1, 16)],  # what is reduced at once is freed
)
"""The ways that are tried."""

WORTH = 1e-3
"""The part of the seconds that another order must save."""

ROOM, LARGEST = 0.05, 2
"""How much more may be held than in the first order: a part of that, and so many times the largest
value that is gathered."""


def scheduled(program: Program) -> Program:
    """The program in the order that takes the least seconds by its timeline, of those tried.

    It may hold two gathered values more at once than in the order of the function, as FSDP does
    that gathers what the next layer needs, and beyond that a part of what that order holds, unless
    it gathers again to hold less. One with loops stays as it is.
    """
    if has_loops(program.eqns) or not any(eqn.is_collective for eqn in program.eqns):
        return program
    lines = lines_of(program, tuple(program.mesh.order[:1]))
    regathers = program.origin is not None and program.origin.regather

    def most(peak: int) -> int:
        sent = [step for eqn in lines.eqns if eqn.is_collective for step in eqn.steps]
        gathered = [step.dst for step in sent if not step.moves.reduced]
        largest = max([int(local_bytes(type, lines.ranks)[0]) for type in gathered], default=0)
        return int((1 if regathers else 1 + ROOM) * peak) + LARGEST * largest

    return attrs.evolve(program, eqns=in_time(lines, most, program.cost).eqns)


def in_time(lines: Lines, most: Callable[[int], int], cost: CostModel) -> Lines:
    """The lines in the order of least seconds, of those tried that do not hold too much.

    `most` gives the bytes that they may hold at once for those that they hold as they are.
    """
    seconds = [line_seconds(lines.types, eqn, cost) for eqn in lines.eqns]
    listing = Listing(lines, seconds)
    best, least = lines, listing.seconds_of(range(len(seconds)))
    enough = listing.least * (1 + WORTH)
    if least <= enough:
        return lines
    held = bytes_held(lines)
    max_bytes = most(int(held.max()))
    releases = listing.releases(held, max_bytes)
    for way in TRIED:
        order = listing.order(way, releases)
        time = listing.seconds_of(order)
        if time >= least * (1 - WORTH):
            continue
        other = attrs.evolve(lines, eqns=tuple(lines.eqns[i] for i in order))
        if bytes_held(other).max() <= max_bytes:
            best, least = other, time
            if least <= enough:
                break
    return best
