"""Memory: what a rank holds beside its source and destination block while steps run.

These are the tensors that the steps make, no estimate: a test counts them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fdtensor.plans.collectives import Step
from fdtensor.plans.collectives.base import local_numel

__all__ = ["peak_at"]


def peak_at(steps: Sequence[Step], rank: int) -> int:
    """The most bytes `rank` holds while the steps run, the caller's input counted."""
    first = steps[0].src
    caller = local_numel(first, rank)
    most, kept = caller, 0
    for step in steps:
        working = step.collective.working_numel(step, rank, owned=kept > 0)
        most = max(most, caller + kept + working)
        kept = local_numel(step.dst, rank)
    return most * first.dtype.itemsize
