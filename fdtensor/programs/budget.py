"""`cheapest_within`: a program that holds at most so many bytes on any rank."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

from fdtensor.layouts.errors import TraceError
from fdtensor.plans.cost import CostModel
from fdtensor.programs.bundles import BUCKET_BYTES, bundled
from fdtensor.programs.memory import lines_of, local_bytes
from fdtensor.programs.program import Program
from fdtensor.programs.rematerialize import fitted
from fdtensor.programs.remerge import merged
from fdtensor.programs.schedule import in_time

__all__ = ["cheapest_within"]

ATTEMPTS = ((1, BUCKET_BYTES), (1, 0), (8, 0), (64, 0), (512, 0))
"""How many times the bytes that calls read and write cost, from one choice of layouts to another:
the dearer they are, the more a choice cuts what it computes. And the most bytes of tensors that
travel together, which are held together."""


def cheapest_within(assemble: Callable[..., Program], max_bytes: int, cost: CostModel) -> Program:
    """The first program that fits in `max_bytes` on each rank, of choices that cut more and more.

    `assemble` is `assembled` without its `choosing` and `packed`. Raises `TraceError` where
    none fits.
    """
    least = 1 << 63
    program = None
    for dearer, bucket_bytes in ATTEMPTS:
        choosing = attrs.evolve(cost, copy=cost.copy / dearer)
        program = bundled(assemble(choosing=choosing, packed=False), bucket_bytes)
        fits, peak = _within(program, max_bytes)
        if fits is not None:
            return fits
        least = min(least, peak)
    assert program is not None
    given = sum(local_bytes(type, program.busiest_ranks) for type in program.in_types)
    raise TraceError(
        f"{program.name} does not fit in {max_bytes} bytes per rank: "
        f"the least that is known to do is {least}.",
        inputs=f"{np.max(given)} bytes per rank",
        hint=f"Cut the inputs over more ranks, or write max_bytes={least}.",
    )


def _within(program: Program, max_bytes: int) -> tuple[Program | None, int]:
    """The program if it fits, else one that makes values again; None where none does; its peak."""
    lines, peak = lines_of(program, program.busiest_ranks), program.peak_bytes
    if peak > max_bytes:
        lines, peak = fitted(lines, max_bytes, program.cost)
        if peak > max_bytes:
            return None, peak
        lines = merged(lines, max_bytes)
    lines = in_time(lines, max_bytes, program.cost)
    fits = attrs.evolve(program, eqns=lines.eqns, outs=lines.outs, types=tuple(lines.types))
    return fits, fits.peak_bytes
