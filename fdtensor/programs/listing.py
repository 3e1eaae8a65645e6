"""`Listing`: the lines of a program as two streams take them, one line after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import Literal

import numpy as np

from fdtensor.ops.saved_values import ALIAS
from fdtensor.plans.collectives import Step, is_local
from fdtensor.plans.cost import CostModel
from fdtensor.programs.eqn import is_view_line
from fdtensor.programs.memory import Lines, bytes_held, local_bytes
from fdtensor.programs.seconds import line_seconds

__all__ = ["Listing", "Priority"]

Priority = Literal["turn", "need"]
"""Which line goes first: the one whose turn it is, or the one that most others wait for."""


class Listing:
    """What an order of lines depends on: who reads what, seconds, and when gathers may start."""

    def __init__(self, lines: Lines, cost: CostModel, max_bytes: int) -> None:
        self.eqns = lines.eqns
        count = len(self.eqns)
        self.seconds = [line_seconds(lines.types, eqn, cost) for eqn in self.eqns]
        self.sends = [eqn.is_collective for eqn in self.eqns]
        maker = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outs if v is not None}
        self.operands = [sorted({maker[v] for v in e.ins if v in maker}) for e in self.eqns]
        self.readers: list[list[int]] = [[] for _ in range(count)]
        for i, makers in enumerate(self.operands):
            for j in makers:
                self.readers[j].append(i)
        self.of_inputs = _of_inputs(lines, self.operands)
        self.after = [0.0] * count
        """The seconds from the end of each line to the end of all, if nothing waits for a link."""
        self.sent_after = [0.0] * count
        """Those of them that are spent on sending."""
        for i in reversed(range(count)):
            for j in self.readers[i]:
                self.after[i] = max(self.after[i], self.after[j] + self.seconds[j])
                sent = self.seconds[j] if self.sends[j] else 0.0
                self.sent_after[i] = max(self.sent_after[i], self.sent_after[j] + sent)
        self.release = self._releases(lines, max_bytes)

    def early(self, i: int) -> bool:
        """Whether a line that sends needs no more than views of inputs."""
        return self.sends[i] and all(self.of_inputs[j] for j in self.operands[i])

    def _releases(self, lines: Lines, max_bytes: int) -> list[int]:
        """For each line the first one, in the old order, before which it may start.

        A gather of an input starts just in time, if the link is free, and where there is room.
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
                if self.early(i):
                    releases[i] = min(i, max(0, bisect_right(clock, link) - 1))
        held = bytes_held(lines)
        for i, eqn in enumerate(self.eqns):
            if releases[i] < i and self.early(i):
                size = np.sum([local_bytes(step.dst, lines.ranks) for step in eqn.steps], 0)
                full = (held[releases[i] : i] + size > max_bytes).any(1).nonzero()[0]
                releases[i] += int(full[-1]) + 1 if full.size else 0
                held[releases[i] : i] += size
        return releases

    def order(self, window: int, compute: Priority, send: Priority) -> list[int]:
        """The lines in their new order, where one that computes is at most `window` lines early.

        Those that could compute go in turn, or first the one that most seconds of sending wait for;
        those that could send go in turn, or first the one that most seconds of all wait for.
        """
        return list(_Streams(self, window, compute, send).run())


def _of_inputs(lines: Lines, operands: list[list[int]]) -> list[bool]:
    """For each line, whether it is a view or a local part of inputs alone."""
    of_inputs: list[bool] = []
    for i, eqn in enumerate(lines.eqns):
        view = is_view_line(eqn) and eqn.op is not ALIAS  # a saved value comes when it is read
        local = view or (isinstance(eqn.op, Step) and is_local(eqn.op))
        of_inputs.append(local and bool(eqn.ins) and all(of_inputs[j] for j in operands[i]))
    return of_inputs


class _Streams:
    """Two streams as they take lines; times are seconds since the start."""

    def __init__(self, listing: Listing, window: int, compute: Priority, send: Priority) -> None:
        self.all, self.window = listing, window
        no = [0.0] * len(listing.eqns)
        self.needed = no if compute == "turn" else listing.sent_after
        self.wanted = no if send == "turn" else listing.after
        count = len(listing.eqns)
        self.clock = self.link = 0.0
        self.stop = [0.0] * count
        self.listed = [False] * count
        self.missing = [
            sum(not (listing.early(i) and listing.of_inputs[j]) for j in listing.operands[i])
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
        """Gathers of inputs by the line before which they may start."""
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
        elif self.all.early(i):
            heappush(self.early, (self.all.release[i], i))
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
        """The lines that start to send before this time, in the order of their priority."""
        while self.sending and max(self.link, self.clock) < time:
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
            if self.all.early(j) and self.all.of_inputs[i]:
                continue
            self.missing[j] -= 1
            if not self.missing[j]:
                self._admit(j)
