"""`discover`: all rows of an op along one mesh axis, found by running it on blocks.

    print(discover(torch.ops.aten.mm.default, (torch.randn(4, 6), torch.randn(6, 5))))

prints the op's rule as Python. A row is tried on blocks of several axis sizes, on cuts that divide
a dim and that do not, on scattered and on empty blocks, and on random splits of pending terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import RuleError
from fdtensor.layouts.placement import Partial, Placement
from fdtensor.layouts.progress import working
from fdtensor.layouts.torch_private import OpOverload
from fdtensor.ops.graph import op_by_name
from fdtensor.ops.notation.core import rule_of
from fdtensor.ops.rows import rows_of
from fdtensor.ops.rules import Row
from fdtensor.testing.discovery.sample import Sample
from fdtensor.testing.discovery.search import Found, attempts, found
from fdtensor.testing.discovery.trial import R, Trial, size_cut
from fdtensor.testing.row_checks import arguments_of, overload_of

__all__ = ["SampleGroup", "Discovered", "discover"]

SUM, AVG = Partial("sum"), Partial("avg")


@attrs.frozen(eq=False)
class SampleGroup:
    """The rows of an op for samples of one number of dims and the same other arguments."""

    samples: tuple[Sample, ...]
    found: tuple[Found, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows, but for that of all R."""
        return tuple(dict.fromkeys(f.row for f in self.found))


@attrs.frozen(eq=False)
class Discovered:
    """The rows of an op that hold on samples; as text, a rule to paste.

    >>> relu = fd.testing.discover(torch.ops.aten.relu.default, (torch.randn(4, 6),))
    >>> isinstance(relu, fd.testing.Discovered), len(relu.cases)
    (True, 1)
    """

    op: Any
    cases: tuple[SampleGroup, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Those that hold on every sample that has their dims."""
        everywhere = dict.fromkeys(row for case in self.cases for row in case.rows)
        return tuple(
            r for r in everywhere if all(r in c.rows or not _fits(r, c) for c in self.cases)
        )

    def missing(self, known: Iterable[Row] | None = None) -> tuple[Row, ...]:
        """The rows that are not among `known`: by default, among those of the op's rule."""
        if known is not None:
            have = {(row.ins, row.outs) for row in known}
            return tuple(r for r in self.rows if (r.ins, r.outs) not in have)
        lacking: dict[Row, None] = {}
        for case in self.cases:
            have = {(row.ins, row.outs) for row in _known(case.samples[0])}
            lacking |= dict.fromkeys(r for r in case.rows if (r.ins, r.outs) not in have)
        return tuple(lacking)

    __reduce__ = op_by_name

    def __str__(self) -> str:
        from fdtensor.testing.discovery.source import source

        return source(self.op, self.cases)


def discover(op: Any, *samples: Any, isolated: bool = True) -> Discovered:
    """All rows of `op`, an aten or custom op or any function of tensors, that hold on the samples.

    A sample is a tuple of arguments, or `(args, kwargs)`; its values are tried, and others like
    them. Give samples on the CPU whose dims differ in size, of 4 or more. A kernel may kill its
    process on operands that do not fit together: unless `isolated` is off, that is a forked one.

    >>> print(fd.testing.discover(torch.ops.aten.relu.default, (torch.randn(4, 6),)))
    import torch
    ...
    @rule(torch.ops.aten.relu.default)
    def rows(x):
        ...
        yield (S(0),), S(0)
        yield (S(1),), S(1)
        yield (Partial("max"),), Partial("max")
        yield (Partial("min"),), Partial("min")
    """
    if not samples:
        raise RuleError("no sample of the op is given.", hint="Write discover(op, (x, y)).")
    calls = [arguments_of(sample) for sample in samples]
    op = overload_of(op, *calls[0])
    cases: dict[Any, list[Sample]] = {}
    for args, kwargs in calls:
        sample = Sample.of(op, args, kwargs)
        if sample.tensors and sample.outs and all(t.numel() for t in sample.outs):
            cases.setdefault(_key(sample), []).append(sample)
    draws: list[list[Sample]] = []
    trials: list[Trial] = []
    ends: list[int] = []
    for known in cases.values():
        first = len(draws)
        draws += [list(s.redrawn(i)) for i, s in enumerate(known)]
        for attempt in dict.fromkeys(a for s in known for a in attempts(s)):
            fitting = [first + i for i, s in enumerate(known) if attempt.fits(s)]
            trials.append(Trial(attempt, tuple(fitting)))
        ends.append(len(trials))
    with working(f"trying {len(trials)} kinds of rows of {op}"):
        results = found(draws, trials, isolated)
    cases_found = []
    for known, (start, stop) in zip(cases.values(), pairwise([0, *ends]), strict=True):
        rows = [f for f in results[start:stop] if f is not None]
        cases_found.append(SampleGroup(tuple(known), tuple(_unimplied(rows))))
    return Discovered(op, tuple(cases_found))


def _key(sample: Sample) -> Any:
    return tuple(t.ndim for t in sample.tensors), repr((sample.call.args, sample.call.kwargs))


def _fits(row: Row, case: SampleGroup) -> bool:
    return any(
        size_cut(row.ins, s.ins) is not None for s in case.samples if len(s.ins) == len(row.ins)
    )


def _known(sample: Sample) -> Sequence[Row]:
    """The rows of the op's rule over an axis of two ranks."""
    op = sample.call.op
    if not isinstance(op, OpOverload) or rule_of(op) is None:
        return ()
    return rows_of(sample.call, [*sample.ins, *sample.results], 2)


def _unimplied(rows: Sequence[Found]) -> list[Found]:
    """The rows but for those that others say.

    Those of averages follow from linearity. What is replicated is also a maximum, a minimum and an
    average of its terms. Operands whose values are not read are placed in other ways one at a time.
    """
    have = {(f.row.ins, f.row.outs) for f in rows}
    return [f for f in rows if not (_said(f.row, have) or _unread(f.row, have))]


Pair = tuple[tuple[Placement, ...], tuple[Placement, ...]]


def _said(row: Row, have: set[Pair]) -> bool:
    """Whether a row of averages, maxima or minima follows from another one."""
    for other in {Partial("avg"), Partial("max"), Partial("min")} & set(row.ins):
        outs = _swapped(row.outs, AVG) if other == AVG else row.outs
        if (_swapped(row.ins, other), outs) in have:
            return True
        for ins, known in have:
            gaps = {(p, q) for p, q in zip(row.ins, ins, strict=True) if p != q}
            if known == row.outs and gaps == {(R, other)}:
                return True
    return False


def _unread(row: Row, have: set[Pair]) -> bool:
    """Whether the row holds also where two operands that it does not keep whole are whole."""

    def whole(places: Sequence[int]) -> bool:
        ins = tuple(R if i in places else p for i, p in enumerate(row.ins))
        return (ins, row.outs) in have or {*ins, *row.outs} == {R}

    free = [i for i, p in enumerate(row.ins) if p != R and whole([i])]
    return len(free) > 1 and whole(free)


def _swapped(placements: Sequence[Placement], other: Placement) -> tuple[Placement, ...]:
    return tuple(SUM if p == other else p for p in placements)
