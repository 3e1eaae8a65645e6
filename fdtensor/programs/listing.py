"""`Listing`: the lines of a program as two streams take them, one line after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from operator import add
from typing import Literal

import attrs
import numpy as np

from fdtensor.ops.saved_values import ALIAS
from fdtensor.programs.eqn import is_part_line
from fdtensor.programs.memory import Bytes, Lines, buffer_bytes, local_bytes
from fdtensor.programs.timeline import operands_of, starts

__all__ = ["Listing", "Priority", "Way"]

Priority = Literal["turn", "need"]
"""Which line goes first: the one whose turn it is, or the one that most others wait for."""


@attrs.frozen
class Way:
    """A way to list lines."""

    window: int
    """How many lines before its turn, less 1, a line may compute."""
    compute: Priority = "turn"
    """Which of the lines that could compute goes first: by need the one that most seconds of
    sending wait for."""
    send: Priority = "need"
    """Which of the lines that could send goes first: by need the one that most seconds of all wait
    for. In turn all go at once."""
    soon: bool = False
    """Whether what is computed and moved whole is sent at once; else it is just in time."""


class Listing:
    """What an order of lines depends on: who reads what, seconds, and when gathers may start."""

    def __init__(self, lines: Lines, seconds: Sequence[float]) -> None:
        self.lines, self.eqns, self.seconds = lines, lines.eqns, seconds
        count = len(self.eqns)
        self.sends = [eqn.is_collective for eqn in self.eqns]
        self.operands = operands_of(self.eqns)
        self.readers: list[list[int]] = [[] for _ in range(count)]
        for i, makers in enumerate(self.operands):
            for j in makers:
                self.readers[j].append(i)
        self.of_inputs = _of_inputs(lines, self.operands)
        self.early = [
            sends and all(self.of_inputs[j] for j in makers)
            for sends, makers in zip(self.sends, self.operands, strict=True)
        ]
        """Whether each line sends and needs no more than views of inputs."""
        self.in_time = [
            sends and not any(step.moves.reduced for step in eqn.steps)
            for sends, eqn in zip(self.sends, self.eqns, strict=True)
        ]
        """Whether each line sends just in time: at once goes what is reduced, and freed by that."""
        self.after = [0.0] * count
        """The seconds from the end of each line to the end of all, if nothing waits for a link."""
        self.sent_after = [0.0] * count
        """Those of them that are spent on sending."""
        for i in reversed(range(count)):
            for j in self.readers[i]:
                self.after[i] = max(self.after[i], self.after[j] + self.seconds[j])
                sent = self.seconds[j] if self.sends[j] else 0.0
                self.sent_after[i] = max(self.sent_after[i], self.sent_after[j] + sent)

    @property
    def least(self) -> float:
        """The seconds that no order takes less than: of a stream, or of lines one after another."""
        sending = sum(t for s, t in zip(self.sends, self.seconds, strict=True) if s)
        longest = max(map(add, self.seconds, self.after), default=0.0)
        return max(sending, sum(self.seconds) - sending, longest)

    def seconds_of(self, order: Iterable[int]) -> float:
        """The seconds that the lines take in an order."""
        begins = starts(order, self.seconds, self.sends, self.operands)
        return max(map(add, begins, self.seconds), default=0.0)

    def releases(self, held: Bytes, max_bytes: int) -> list[int]:
        """For each line the first one, in the old order, before which it may start.

        What is not reduced starts just in time, if the link is free, and where there is room beside
        what is `held` in the old order.
        """
        computing = [0.0 if s else t for s, t in zip(self.sends, self.seconds, strict=True)]
        clock = [0.0, *accumulate(computing)]
        releases = [0] * len(self.eqns)
        due = dict[int, float]()
        link = inf
        for i in reversed(range(len(self.eqns))):
            if self.sends[i]:
                wanted = [due.get(j, clock[j]) for j in self.readers[i]]
                link = min([link, clock[-1], *wanted]) - self.seconds[i]
                due[i] = link
                if self.in_time[i]:
                    releases[i] = min(i, max(0, bisect_right(clock, link) - 1))
        room: Bytes = max_bytes - held
        ranks = self.lines.ranks
        for i, eqn in enumerate(self.eqns):
            if releases[i] < i and self.in_time[i]:
                size: Bytes = np.sum([local_bytes(step.dst, ranks) for step in eqn.steps], 0)
                size = size + buffer_bytes(eqn, ranks)
                full = np.flatnonzero(np.any(room[releases[i] : i] < size, 1))
                releases[i] += int(full[-1]) + 1 if full.size else 0
                room[releases[i] : i] -= size
        return releases

    def order(self, way: Way, releases: Sequence[int]) -> list[int]:
        """The lines in their new order, those just in time after the lines that release them."""
        return list(_Streams(self, way, releases).run())


def _of_inputs(lines: Lines, operands: list[list[int]]) -> list[bool]:
    """For each line, whether it is a view or a local part of inputs alone."""
    of_inputs: list[bool] = []
    for i, eqn in enumerate(lines.eqns):
        local = bool(eqn.ins) and is_part_line(eqn)
        of_inputs.append(local and all(of_inputs[j] for j in operands[i]))
    return of_inputs


class _Streams:
    """Two streams as they take lines; times are seconds since the start."""

    def __init__(self, listing: Listing, way: Way, releases: Sequence[int]) -> None:
        self.all, self.window, self.releases = listing, way.window, releases
        no = [0.0] * len(listing.eqns)
        self.needed = no if way.compute == "turn" else listing.sent_after
        self.wanted = no if way.send == "turn" else listing.after
        self.at_once = way.send == "turn"
        self.in_time = listing.early if way.soon else listing.in_time
        count = len(listing.eqns)
        self.clock = self.link = 0.0
        self.stop = [0.0] * count
        self.listed = [False] * count
        self.missing = [
            sum(not (listing.early[i] and listing.of_inputs[j]) for j in listing.operands[i])
            for i in range(count)
        ]
        self.first = 0
        """The first line that computes and is not listed."""
        self.later: list[tuple[int, int]] = []
        """Lines that may compute but for the window, by the last that may not be first.

        A saved value waits for its turn, for it is cut to hold less until then.
        """
        self.coming: list[tuple[float, int]] = []
        """Lines whose operands arrive, by when they do."""
        self.ready: list[tuple[float, int]] = []
        """Lines whose operands are there, in the order of their priority."""
        self.sending: list[tuple[float, int]] = []
        """Lines that may send, in the order of theirs."""
        self.early: list[tuple[int, int]] = []
        """Lines that send just in time by the line before which they may start."""
        for i in range(count):
            if not self.missing[i]:
                self._admit(i)

    def run(self) -> Iterator[int]:
        """The lines as they are taken."""
        count = len(self.all.eqns)
        done = 0
        while done < count:
            for i in self._next():
                done += 1
                yield i

    def _admit(self, i: int) -> None:
        """Adds a line whose operands are listed."""
        if not self.all.sends[i]:
            early = 1 if self.all.eqns[i].op is ALIAS else self.window
            heappush(self.later, (i - early, i))
        elif self.in_time[i]:
            heappush(self.early, (self.releases[i], i))
        else:
            heappush(self.sending, (-self.wanted[i], i))

    def _next(self) -> Iterator[int]:
        """The next line that computes, after those that send meanwhile; or one that must send."""
        self._refresh()
        if not self.ready and not self.coming:
            if not self.sending:  # nothing else is left: it is wanted now
                i = heappop(self.early)[1]
                heappush(self.sending, (-self.wanted[i], i))
            yield from self._send(heappop(self.sending)[1])
        elif not self.ready:
            yield from self._sent_by(self.coming[0][0])
            self.clock = max(self.clock, self.coming[0][0])
        else:
            i = heappop(self.ready)[1]
            if self.listed[i]:  # a view that a gather had to come after
                return
            stop = self.clock + self.all.seconds[i]
            yield from self._sent_by(stop)
            self.clock = stop
            yield from self._list(i, stop)

    def _refresh(self) -> None:
        """Moves lines on whose turn has come."""
        count = len(self.all.eqns)
        while self.first < count and (self.listed[self.first] or self.all.sends[self.first]):
            self.first += 1
        while self.later and self.later[0][0] < self.first:
            i = heappop(self.later)[1]
            arrived = max([self.stop[j] for j in self.all.operands[i]], default=0.0)
            heappush(self.coming, (arrived, i))
        while self.coming and self.coming[0][0] <= self.clock:
            i = heappop(self.coming)[1]
            heappush(self.ready, (-self.needed[i], i))
        while self.early and self.early[0][0] <= self.first:
            i = heappop(self.early)[1]
            heappush(self.sending, (-self.wanted[i], i))

    def _sent_by(self, time: float) -> Iterator[int]:
        """The lines that start to send before this time, in the order of their priority.

        In turn all do that may, so that what they send is freed, and wait for the link there.
        """
        while self.sending and (self.at_once or max(self.link, self.clock) < time):
            yield from self._send(heappop(self.sending)[1])

    def _send(self, i: int) -> Iterator[int]:
        """A line that sends, after the views of inputs that it reads."""
        for j in self.all.operands[i]:
            if not self.listed[j]:
                yield from self._views(j)
        arrived = max([self.stop[j] for j in self.all.operands[i]], default=0.0)
        self.link = max(self.link, self.clock, arrived) + self.all.seconds[i]
        yield from self._list(i, self.link)

    def _views(self, i: int) -> Iterator[int]:
        for j in self.all.operands[i]:
            if not self.listed[j]:
                yield from self._views(j)
        yield from self._list(i, 0.0)

    def _list(self, i: int, stop: float) -> Iterator[int]:
        """The line, unless it is listed; lines that read it may come now."""
        if self.listed[i]:
            return
        self.listed[i], self.stop[i] = True, stop
        yield i
        for j in self.all.readers[i]:
            if self.all.early[j] and self.all.of_inputs[i]:
                continue
            self.missing[j] -= 1
            if not self.missing[j]:
                self._admit(j)
