"""`Groups`: the process groups of a plane: made at their first use, met, cut and made anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs

from fdtensor.layouts.torch_private import c10d_group
from fdtensor.runtime.control.patience import Patience
from fdtensor.runtime.control.sockets import listening_ports, shut
from fdtensor.runtime.process_groups import (
    free_group,
    group_name,
    make_group,
    renamed,
    set_timeout,
)

__all__ = ["Groups"]

_MAKING = threading.Lock()
"""Held while a group is made: torch has one table of them, and reads the environment."""


@attrs.define(eq=False)
class _Group:
    """A process group of ours: its turn counts the errors after which it was made anew."""

    ranks: tuple[int, ...]
    name: str
    backend: str | None
    seconds: float | None = None
    """How long its ranks wait for each other, where that does not follow the Comm."""
    handle: Any = None
    """The group itself."""
    turn: int = 0
    ports: frozenset[int] = frozenset()
    is_cut: bool = False
    """Whether its connections are shut down."""
    met: set[int] = attrs.field(factory=lambda: set[int]())
    """The ranks that are known to use it."""

    @property
    def key(self) -> str:
        """Its name, of this turn."""
        return f"{self.name}@{self.turn}" if self.turn else self.name


class Groups:
    """The process groups of a thread, by name; `store` is where their ranks find each other.

    `board` is a store for what they say of the groups, None where nobody waits for others;
    `is_stopped` tells whether a call that is open has to end.
    """

    def __init__(
        self, rank: int, lane: str, store: Any, board: Any | None, is_stopped: Callable[[], bool]
    ) -> None:
        self.rank, self.lane, self.store, self.board = rank, lane, store, board
        self.is_stopped = is_stopped
        self.seconds = 0.0
        """How long ranks wait for each other."""
        self.known: dict[str, _Group] = {}
        self.unmet: set[str] = set()
        """The groups that some rank may not have come to yet, and those that are cut."""
        self.faults: dict[str, dict[int, bool]] = {}
        """The errors so far by name: the ranks known to have raised each, and which were clean."""
        self.lock = threading.RLock()

    def wait_for(self, seconds: float) -> None:
        """Sets how long ranks wait for each other, in the groups so far and in those to come."""
        if seconds != self.seconds:
            self.seconds = seconds
            for group in list(self.known.values()):
                if group.seconds is None and not group.is_cut:
                    set_timeout(group.handle, seconds)

    def group(self, ranks: tuple[int, ...]) -> str:
        """The name of the group of these ranks, made at its first use by its members."""
        return self.named(ranks, group_name(ranks, self.lane))

    def handle(self, ranks: tuple[int, ...], peers: Sequence[int]) -> Any:
        """The group of these ranks itself, to which this rank and `peers` have come."""
        name = self.group(ranks)
        if name in self.unmet:
            self.meet(name, peers)
        return self.known[name].handle

    def named(
        self,
        ranks: tuple[int, ...],
        name: str,
        backend: str | None = None,
        seconds: float | None = None,
    ) -> str:
        """The name of a group with these ranks in this order, made at its first use."""
        group = self.known.get(name)
        if group is None:
            group = self.known[name] = _Group(ranks, name, backend, seconds)
            self._make(group)
        return name

    def meet(self, name: str, peers: Iterable[int] | None = None) -> None:
        """Waits until the ranks of a group, or `peers` of them, are in the call that uses it.

        A wait of this kind ends with the next alarm; one of gloo for a rank that it has never met
        does not.
        """
        group, board = self.known[name], self.board
        if group.is_cut:
            raise RuntimeError("connection closed: after an error of another rank")
        assert board is not None
        if self.rank not in group.met:
            board.set(f"came/{group.key}/{self.rank}", "")
            group.met.add(self.rank)
        missing = [r for r in (group.ranks if peers is None else peers) if r not in group.met]
        keys = [f"came/{group.key}/{rank}" for rank in missing]
        patience = Patience(board, self.seconds)
        while keys and not board.check(keys):
            if group.is_cut or self.is_stopped() or patience.is_over():
                raise RuntimeError("timed out: a rank has not come to the group")
            time.sleep(0.01)
        group.met.update(missing)
        if len(group.met) == len(group.ranks):
            self.unmet.discard(name)

    def _make(self, group: _Group) -> None:
        group.turn = self._turn(group)
        name = group.key
        old, group.handle = group.handle, None
        with _MAKING:
            if old is not None:
                free_group(old)
                del old  # it closes its ports before those of the new one are told apart
            before = listening_ports()
            seconds = self.seconds if group.seconds is None else group.seconds
            make_group(group.ranks, name, self.store, seconds, group.backend)
            if group.turn:
                renamed(name, group.name)
            group.ports = listening_ports() - before
        group.is_cut, group.met = False, set()
        group.handle = c10d_group(group.name)
        if self.board is not None:
            self.unmet.add(group.name)
            self.board.set(f"ports/{name}/{self.rank}", ",".join(map(str, group.ports)))

    # --- after errors ------------------------------------------------------------------------

    def abort(self, ranks: Sequence[int]) -> None:
        """Ends the waits of this process in the groups of some of these ranks, with errors."""
        with self.lock:
            for group in list(self.known.values()):
                if set(group.ranks) <= set(ranks):
                    self._cut(group)

    def is_cut(self, ranks: Sequence[int]) -> bool:
        """Whether a group of some of these ranks is of no use any more."""
        groups = list(self.known.values())
        return any(group.is_cut and set(group.ranks) <= set(ranks) for group in groups)

    def renew(self, error: str, back: Mapping[int, bool]) -> None:
        """Makes the groups anew in which an error of this name left something under way.

        `back` has the ranks that have raised it, and whether nothing was under way of each.
        """
        self.faults.setdefault(error, {}).update(back)
        for group in list(self.known.values()):
            if group.turn != self._turn(group):
                with self.lock:
                    self._cut(group)
                self._make(group)

    def _turn(self, group: _Group) -> int:
        """After how many errors a group has to be made anew.

        All of its ranks count the same ones, whether they had made it before an error or not.
        """
        covering = [fault for fault in self.faults.values() if fault.keys() >= {*group.ranks}]
        return sum(not all(fault[rank] for rank in group.ranks) for fault in covering)

    def _cut(self, group: _Group) -> None:
        if not group.is_cut:
            group.is_cut = True
            self.unmet.add(group.name)
            shut(group.ports, self._ports_of_others(group))

    def _ports_of_others(self, group: _Group) -> set[int]:
        """The ports on which the other ranks of a group listen, of those that have said so."""
        ports: set[int] = set()
        board = self.board
        if board is None:
            return ports
        with suppress(RuntimeError, OSError):
            for rank in group.ranks:
                key = f"ports/{group.key}/{rank}"
                if rank != self.rank and board.check([key]):
                    ports.update(map(int, filter(None, board.get(key).decode().split(","))))
        return ports
