"""`Lines`: what the ranks print, in order, with equal lines of several ranks merged into one."""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Literal

import attrs

from fdtensor.layouts.text import spans

__all__ = ["Lines", "Stream", "show"]

Stream = Literal["stdout", "stderr"]

_Said = tuple[Stream, str]


@attrs.frozen
class _Line:
    said: _Said
    place: int
    """Which line of its rank it is."""
    since: float


class Lines:
    """The lines of `n` ranks during one call.

    A line is held back while a rank that is still at work may yet print it too, but at most
    `patience` seconds. So what a short call shows depends on what was printed, not on when.
    """

    def __init__(self, n: int, patience: float = 1.0) -> None:
        self.patience = patience
        self._queues: list[deque[_Line]] = [deque() for _ in range(n)]
        self._ahead: list[Counter[_Said]] = [Counter() for _ in range(n)]
        self._places = [0] * n
        self._parts: dict[tuple[int, Stream], bytes] = {}
        self._open = set(range(n))
        self._last: list[int] = []

    def take(self, rank: int, stream: Stream, data: bytes, now: float) -> None:
        """Adds what `rank` has written; the rest of a line may come later."""
        *lines, rest = (self._parts.pop((rank, stream), b"") + data).split(b"\n")
        self._parts[rank, stream] = rest
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            printed = (stream, text)  # of a progress bar, its last state
            self._queues[rank].append(_Line(printed, self._places[rank], now))
            self._ahead[rank][printed] += 1
            self._places[rank] += 1

    def close(self, rank: int, now: float) -> None:
        """Says that `rank` prints no more."""
        self._open.discard(rank)
        for stream in ("stdout", "stderr"):
            if self._parts.get((rank, stream)):
                self.take(rank, stream, b"\n", now)

    def ready(self, now: float) -> Iterator[tuple[list[int], Stream, str]]:
        """The lines to show now, each with the ranks that printed it."""
        while groups := self._fronts(now) or self._fronts():
            ranks, printed = self._first(groups)
            if not self._fronts(now) and not self._open <= set(ranks):
                return
            for rank in ranks:
                self._queues[rank].popleft()
                self._ahead[rank][printed] -= 1
            self._last = ranks
            yield ranks, *printed

    def due(self) -> float | None:
        """When the next line is to be shown, whoever else may print it; None if there is none."""
        waiting = [queue[0].since for queue in self._queues if queue]
        return min(waiting) + self.patience if waiting else None

    def _fronts(self, now: float = math.inf) -> dict[_Said, list[int]]:
        """The next line of each rank, if one has waited long enough at `now`, and half as long."""
        fronts = [(rank, queue[0]) for rank, queue in enumerate(self._queues) if queue]
        waited = max((now - line.since for _, line in fronts), default=0.0)
        groups: dict[_Said, list[int]] = {}
        for rank, line in fronts if waited >= self.patience else ():
            if now - line.since >= self.patience / 2:  # in the order of ranks, if about as old
                groups.setdefault(line.said, []).append(rank)
        return groups

    def _first(self, groups: dict[_Said, list[int]]) -> tuple[list[int], _Said]:
        """The line to show next, of these: one that no other rank has further back.

        Of those the next of the ranks that were shown last, so that their lines stay together; else
        the one that is earliest on its ranks.
        """

        def key(printed: _Said) -> tuple[bool, bool, int, int]:
            ranks = groups[printed]
            place = min(self._queues[rank][0].place for rank in ranks)
            return self._elsewhere(printed, ranks), ranks != self._last, place, ranks[0]

        printed = min(groups, key=key)
        return groups[printed], printed

    def _elsewhere(self, printed: _Said, ranks: list[int]) -> bool:
        """Whether a rank that is not among `ranks` has printed it too."""
        return any(ahead[printed] for rank, ahead in enumerate(self._ahead) if rank not in ranks)


def show(lines: Iterable[tuple[list[int], Stream, str]]) -> None:
    """Prints lines behind their ranks: `[0-3] loss 1.25`."""
    for ranks, stream, text in lines:
        print(f"[{spans(ranks)}] {text}", file=getattr(sys, stream), flush=True)
