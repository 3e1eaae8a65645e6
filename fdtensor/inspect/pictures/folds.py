"""`folds`: where a sequence repeats, as layers do, so that one copy stands for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby

import attrs

__all__ = ["Fold", "folds"]

PERIODS = 16
"""How many lengths of a copy are tried; more are rarely long runs."""


WIDTHS = (1, 4, 16)
"""How long the runs are that are looked for again: an element may be there twice in a copy."""


@attrs.frozen
class Fold:
    """Copies of `period` elements, one after the other, from `start` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """The place after the last copy."""
        return self.start + self.period * self.count

    @property
    def left_out(self) -> int:
        """How many elements one copy stands for beside its own."""
        return self.period * (self.count - 1)


def folds(keys: Sequence[Hashable], least: int = 8) -> list[Fold]:
    """The repeats of a sequence, apart and in order; those that leave out most are taken first.

    Each leaves out `least` elements or more.

    >>> folds("start" + 9 * "layer" + "end")
    [Fold(start=5, period=5, count=9)]
    """
    chosen: list[Fold] = []
    parts = [(0, len(keys))]
    while parts:
        first, last = parts.pop()
        best = max(_repeats(keys, first, last), key=_worth, default=None)
        if best is not None and best.left_out >= least:
            chosen.append(best)
            parts += [(first, best.start), (best.stop, last)]
    return sorted(chosen, key=lambda fold: fold.start)


def _worth(fold: Fold) -> tuple[int, int, int]:
    return fold.left_out, -fold.period, -fold.start


def _repeats(keys: Sequence[Hashable], first: int, last: int) -> Iterator[Fold]:
    """Runs of copies between two places, of the lengths that are likely."""
    for period in _periods(keys, first, last):
        same = (keys[i] == keys[i + period] for i in range(first, last - period))
        start = first
        for equal, run in groupby(same):
            length = sum(1 for _ in run)
            if equal and length >= period:
                yield Fold(start, period, length // period + 1)
            start += length


def _periods(keys: Sequence[Hashable], first: int, last: int) -> list[int]:
    """How far apart equal elements are, and equal runs of some, the most frequent first."""
    distances: Counter[int] = Counter()
    for width in WIDTHS:
        seen: dict[Hashable, int] = {}
        for i in range(first, last - width + 1):
            run = tuple(keys[i : i + width])
            if run in seen:
                distances[i - seen[run]] += 1
            seen[run] = i
    return [period for period, _ in distances.most_common(PERIODS)]
