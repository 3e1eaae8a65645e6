"""`found`: which placements of the operands of an op are those of a row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import attrs
import torch

from fdtensor.layouts.placement import Partial, Placement, Shard
from fdtensor.ops.graph import Full, tensors_in
from fdtensor.ops.rules import Row
from fdtensor.testing.discovery.child import in_child
from fdtensor.testing.discovery.sample import Sample
from fdtensor.testing.discovery.trial import PENDING, Attempt, R, Trial, judged, size_cut

__all__ = ["Found", "attempts", "found"]

MOST = 500
"""Attempts on a sample beyond which tensors of one shape in a list are placed alike."""


@attrs.frozen
class Found:
    """A row that holds, and where it does not."""

    row: Row
    attempt: Attempt
    refuses_empty: bool
    """Whether the op refuses blocks that hold nothing."""
    stretches: bool
    """Whether the op takes an operand of size 1 where dims are cut together: it broadcasts."""


def attempts(sample: Sample) -> Iterator[Attempt]:
    """All placements of the operands of a sample that may be a row, plain cuts first."""
    ins = sample.ins
    sizes = sorted({n for full in ins for n in full.shape if n > 1})
    for kind in (None, *PENDING):
        for size in (None, *(sizes if kind != Partial("avg") else ())):
            options: list[list[Placement]] = []
            for full in ins:
                cuts = [Shard(d) for d, n in enumerate(full.shape) if n == size]
                # the sum of bools is their maximum
                terms = [kind] if kind not in (None, _unsummed(full)) else []
                options.append([R, *cuts, *terms])
            for placed in _products(sample, options):
                cut = any(isinstance(p, Shard) for p in placed)
                if cut == (size is not None) and (kind is None or kind in placed):
                    if (cut or kind is not None) and size_cut(placed, ins) is not None:
                        yield Attempt(placed)
                    if kind is None:
                        yield from _resized(sample, placed, size)


def _unsummed(full: Full) -> Placement | None:
    return Partial("sum") if full.dtype is torch.bool else None


def _resized(sample: Sample, placed: tuple[Placement, ...], size: int | None) -> Iterator[Attempt]:
    """Those in which an argument is the shape of a block of an output."""
    for place, number in sample.sizes():
        for d, n in enumerate(sample.outs[number].shape):
            if n > 1 and size in (None, n):
                yield Attempt(placed, ((place, number), d))


def _products(
    sample: Sample, options: Sequence[Sequence[Placement]]
) -> Iterator[tuple[Placement, ...]]:
    """A choice for each operand; for all of one shape in a list at once if there are too many."""
    groups: list[list[int]] = [[i] for i in range(len(options))]
    if prod(map(len, options)) > MOST:
        alike: dict[Any, list[int]] = {}
        for k, arg in enumerate((*sample.call.args, *sample.call.kwargs)):
            for v in tensors_in(arg):
                alike.setdefault((k, sample.ins[v.index]), []).append(v.index)
        groups = list(alike.values())
    for chosen in itertools.product(*(options[g[0]] for g in groups)):
        placed: list[Placement] = [R] * len(options)
        for group, p in zip(groups, chosen, strict=True):
            for i in group:
                placed[i] = p
        yield tuple(placed)


def found(
    draws: Sequence[Sequence[Sample]], trials: Sequence[Trial], isolated: bool
) -> list[Found | None]:
    """The verdict of each trial; `draws` are the samples, each with several values."""
    verdicts: dict[int, dict[int, tuple[Placement, ...] | None]] = {}
    results = in_child(draws, trials) if isolated else judged(draws, trials)
    for number, phase, outs in results:
        verdicts.setdefault(number, {})[phase] = outs
    rows: list[Found | None] = []
    for number, trial in enumerate(trials):
        phases = verdicts.get(number, {})
        outs = phases.get(0)
        wrong = 2 in phases and phases[2] is None
        if outs is None or wrong or {*trial.attempt.ins, *outs} == {R}:
            rows.append(None)
            continue
        row = Row(trial.attempt.ins, outs, contiguous=phases.get(1) is None)
        accident = _by_accident([sample for i in trial.samples for sample in draws[i]], row)
        kind = phases.get(3) is None, phases.get(4) is not None
        rows.append(None if accident else Found(row, trial.attempt, *kind))
    return rows


def _by_accident(samples: Sequence[Sample], row: Row) -> bool:
    """Whether all outputs are of one value whatever comes in, and not cut as all operands are."""
    values = [t.reshape(-1) for s in samples for t in s.outs]
    first = values[: len(row.outs)]
    return not all(isinstance(p, Shard) for p in (*row.ins, *row.outs)) and all(
        len(v) and bool((v == first[i % len(first)][0]).all()) for i, v in enumerate(values)
    )
