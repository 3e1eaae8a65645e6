"""`cheapest_within`: a program that holds at most so many bytes on any rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import numpy as np

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.free_type import FreeType
from fdtensor.plans.cost import CostModel
from fdtensor.programs.buckets import BUCKET_BYTES
from fdtensor.programs.bundles import bundled
from fdtensor.programs.loops import has_loops
from fdtensor.programs.memory import bytes_held, least_held, lines_of, local_bytes
from fdtensor.programs.program import Program
from fdtensor.programs.rematerialize import fitted
from fdtensor.programs.remerge import merged
from fdtensor.programs.schedule import in_time
from fdtensor.programs.timeline import timeline

__all__ = ["cheapest_within"]

ATTEMPTS = ((1, BUCKET_BYTES), (1, 0), (8, 0), (64, 0), (512, 0))
"""How many times the bytes that calls read and write cost, from one choice of layouts to another:
the dearer they are, the more a choice cuts what it computes. And the most bytes of tensors that
travel together, which are held together."""


HELD = (0.0, 0.25, 1.0, 4.0, 16.0, 256.0)
"""How many times as much as its message a byte of an open input costs for being held, from one
choice to another: the dearer it is, the more of them are cut, the largest first."""


SHARES = (1.0, 0.85, 0.75)
"""What shares of the budget are held to when values are made again: what is left is room in which
collectives may start earlier."""


SLOWER = 1.5
"""How many times longer a program may take that makes values again, before others are tried."""


def cheapest_within(
    assemble: Callable[..., Program], max_bytes: int, cost: CostModel, types: Sequence[object]
) -> Program:
    """The program that takes the least time of those that fit in `max_bytes` on each rank.

    Choices cut more and more, so that the first that fits as it is, or makes little again, will do;
    where there are free ones among `types`, of inputs, one that makes values again may take more
    than the next.
    `assemble` is `assembled` without its `choosing`, `packed` and `holding`. Raises `TraceError`
    where none fits.
    """
    fitting: list[Program] = []
    least: dict[Program, int] = {}
    """What is known to do for each program that was tried; 0 for those that never can."""
    free = any(isinstance(type, FreeType) for type in types)
    for dearer, bucket_bytes, held in _attempts(free):
        choosing = attrs.evolve(cost, copy=cost.copy / dearer)
        how = {"choosing": choosing, "holding": held / cost.bandwidth, "packed": False}
        program = bundled(assemble(**how), bucket_bytes)
        if program in least:  # other prices often choose the same
            continue
        least[program] = 0
        if _least_held(program) > max_bytes:
            continue
        fits, least[program] = _within(program, max_bytes)
        if fits is not None:
            fitting.append(fits)
            if program.peak_bytes <= max_bytes or (not free and _is_quick(fits, program)):
                break
    if fitting:
        return min(fitting, key=lambda program: timeline(program, cost).seconds)
    raise _nothing_fits(least, max_bytes)


def _nothing_fits(least: Mapping[Program, int], max_bytes: int) -> TraceError:
    """The error where none of these programs fits; `least` is 0 for those that never can."""
    known = min([peak for peak in least.values() if peak], default=1 << 63)
    needs = {program: _least_held(program) for program, peak in least.items() if not peak}
    for program in sorted(needs, key=needs.__getitem__):
        if needs[program] < known:
            known = min(known, _within(program, 0)[1])
    *_, program = least
    given = sum(local_bytes(type, program.busiest_ranks) for type in program.in_types)
    looped = "Or compute the steps of a loop again: torch.utils.checkpoint in the step of fd.scan."
    return TraceError(
        f"{program.name} does not fit in {max_bytes} bytes per rank: "
        f"the least that is known to do is {known}.",
        inputs=f"{np.max(given)} bytes per rank",
        hint=f"Cut the inputs over more ranks, or write max_bytes={known}."
        + (f" {looped}" if has_loops(program.eqns) else ""),
    )


def _least_held(program: Program) -> int:
    return least_held(lines_of(program, program.busiest_ranks))


def _is_quick(fits: Program, program: Program) -> bool:
    """Whether a program that fits takes not much longer than the one that it was made of."""
    with_less, before = (timeline(p, program.cost).seconds for p in (fits, program))
    return with_less <= SLOWER * before


def _attempts(free: bool) -> Iterator[tuple[int, int, float]]:
    """The attempts, each with what a byte of an open input costs."""
    if free:
        yield from ((1, BUCKET_BYTES, held) for held in HELD)
    for dearer, bucket_bytes in ATTEMPTS[free:]:
        yield dearer, bucket_bytes, HELD[-1] if free else 0.0


def _within(program: Program, max_bytes: int) -> tuple[Program | None, int]:
    """The program if it fits, else one that makes values again; None where none does; its peak."""
    lines, peak = lines_of(program, program.busiest_ranks), program.peak_bytes
    if has_loops(program.eqns):  # what is made again may not cross the ends of a loop
        return program if peak <= max_bytes else None, peak
    some = [lines]
    if peak > max_bytes:
        each = fitted(lines, [int(share * max_bytes) for share in SHARES], program.cost)
        tight = [tighter for tighter, most in each if most <= max_bytes]
        pairs = [(merged(tighter, max_bytes), tighter) for tighter in tight]
        some = [m if bytes_held(m).max() <= max_bytes else tighter for m, tighter in pairs]
        if not some:
            return None, min(most for _, most in each)
    programs: list[Program] = []
    for one in some:
        timed = in_time(one, lambda _: max_bytes, program.cost)
        types = tuple(timed.types)
        programs.append(attrs.evolve(program, eqns=timed.eqns, outs=timed.outs, types=types))
    fits, *others = programs
    for other in others:  # what holds less may send more, which a little time is not worth
        if timeline(other, program.cost).seconds < 0.98 * timeline(fits, program.cost).seconds:
            fits = other
    return fits, fits.peak_bytes
