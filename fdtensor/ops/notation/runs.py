"""Dims whose entries are those of another dim in known runs: `out[i] = x[source[i]]`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fdtensor.layouts.blocks import Intervals, locate
from fdtensor.ops.notation.core import Halo

__all__ = ["Runs", "needed", "taken"]

Runs = Sequence[range]
"""The sources of the entries of a dim, one run after the other; a run may descend."""


def needed(dim: int, runs: Runs) -> Halo:
    """The placement of dim `dim` from which each block of the dim that `runs` describe is made."""

    def of_block(start: int, stop: int) -> list[tuple[int, int]]:
        return [_ends(run) for run in _between(runs, start, stop)]

    return Halo(dim, sum(map(len, runs)), of_block)


def taken(
    x: torch.Tensor, dim: int, held: Intervals, wanted: Intervals, runs: Runs
) -> torch.Tensor:
    """Entries `wanted` of the dim that `runs` describe, from a block that holds `held` of `dim`."""
    parts = []
    for start, stop in wanted:
        for run in _between(runs, start, stop):
            ((low, high),) = locate(held, (_ends(run),))
            part = x
            if len(run) < x.shape[dim]:
                part = torch.ops.aten.slice.Tensor(x, dim, low, high, abs(run.step))
            parts.append(part.flip(dim) if run.step < 0 else part)
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def _between(runs: Runs, start: int, stop: int) -> list[range]:
    """The runs of entries `start` to `stop`."""
    parts, passed = [], 0
    for run in runs:
        parts.append(run[max(0, start - passed) : max(0, stop - passed)])
        passed += len(run)
    return [run for run in parts if run]


def _ends(run: range) -> tuple[int, int]:
    """The smallest range that holds a run."""
    return min(run[0], run[-1]), max(run[0], run[-1]) + 1
