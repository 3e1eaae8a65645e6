"""`Plane`: the control plane of a process: its ledgers, and the process groups they watch over."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import ref

import attrs
import torch.distributed as dist

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.torch_private import (
    c10d_group,
    default_store,
    local_store,
    prefixed,
    store_port,
)
from fdtensor.runtime.control.behind import put_behind
from fdtensor.runtime.control.causes import told_of
from fdtensor.runtime.control.flight import FOLDER, write
from fdtensor.runtime.control.ledger import Ledger
from fdtensor.runtime.control.sockets import limit_silence, listening_ports, shut
from fdtensor.runtime.control.watcher import watch
from fdtensor.runtime.process_groups import SECONDS, group_name, make_group, renamed

__all__ = ["Plane"]

_ROOM = "fdtensor_control"

_MAKING = threading.Lock()
"""Held while a group is made: torch has one table of them, and reads the environment."""


@attrs.define(eq=False)
class _Group:
    """A process group of ours: its turn counts how often it was made anew."""

    ranks: tuple[int, ...]
    name: str
    backend: str | None
    handle: Any = None
    """The group itself."""
    turn: int = 0
    ports: frozenset[int] = frozenset()
    is_cut: bool = False
    """Whether its connections are shut down."""
    is_met: bool = False
    """Whether all of its ranks have made it."""
    errors: set[str] = attrs.field(factory=lambda: set[str]())
    """The errors after which it was made anew."""

    @property
    def key(self) -> str:
        """Its name, of this turn."""
        return f"{self.name}@{self.turn}" if self.turn else self.name


class Plane:
    """What the Comms of a thread say and hear beside the data.

    `lane` is the name of the thread, which is the same on all ranks; that of the main one is empty.
    `store` is the one in which ranks post, on a connection of its own; `seconds` is how long they
    wait for each other.
    """

    def __init__(self, world: Any, lane: str = "") -> None:
        self.world = ref(world)
        self.lane = lane
        self.rank = dist.get_rank()
        self.pid = os.getpid()
        self.seconds = SECONDS  # changed by `wait_for`
        self.tag = 0
        """The tag of messages: the fingerprint of the open call, for which no other takes them."""
        self.is_fake = dist.get_backend() == "fake"
        """Whether the other ranks are made up, by torch's backend for tests: nobody waits then."""
        store = local_store() if self.is_fake else default_store()
        self.store = prefixed(store.clone(), f"{_ROOM}/{lane}" if lane else _ROOM)
        self.data_store = store.clone()
        self.ledgers: dict[tuple[int, ...], Ledger] = {}
        self.groups: dict[str, _Group] = {}
        self.lock = threading.RLock()
        self.end_watch: Callable[[], None] = lambda: None
        if not self.is_fake:
            self.end_watch = watch(self)

    def wait_for(self, seconds: float) -> None:
        """Sets how long ranks wait for each other, and this one for its store."""
        self.seconds = seconds
        port = store_port(self.data_store)
        if port is not None:
            limit_silence(port, seconds)

    # --- ledgers -----------------------------------------------------------------------------

    def ledger(self, ranks: tuple[int, ...]) -> Ledger:
        """The ledger of these ascending ranks."""
        ledger = self.ledgers.get(ranks)
        if ledger is None:
            ledger = self.ledgers[ranks] = Ledger(ranks, group_name(ranks), self)
            for other in self.ledgers.values():
                if other.failed:
                    put_behind(ledger, other)
        return ledger

    def put_behind(self, failed: Ledger) -> None:
        """Has the ledgers that may use its groups begin their next call after it has begun anew."""
        for ledger in list(self.ledgers.values()):
            put_behind(ledger, failed)

    def spread(self, ranks: tuple[int, ...], error: BaseException) -> None:
        """Tells ranks of an error that came up in calls with others, for which they may wait."""
        ledger = self.ledger(ranks)
        if not ledger.failed:
            with suppress(RuntimeError, OSError):  # without its store nobody hears of it
                ledger.fail("raised", told_of(error), clean=False)

    def unfit(self) -> CommError | None:
        """The error of whoever makes a call where this process or its group is not what it was."""
        if os.getpid() != self.pid:
            return CommError(
                "this process was forked from a rank, and is none itself.",
                rank=self.rank,
                hint="Start processes by `spawn`, or call connect(mesh) on ranks only.",
            )
        if self.world() is None or self.world() is not dist.group.WORLD:
            return CommError(
                "the process group of this Comm has ended.",
                hint="Make a new Comm after init_process_group: connect(mesh).",
            )
        return None

    # --- process groups ----------------------------------------------------------------------

    def group(self, ranks: tuple[int, ...]) -> str:
        """The name of the group of these ranks, made at its first use by its members."""
        return self.named_group(ranks, group_name(ranks, self.lane))

    def handle(self, ranks: tuple[int, ...]) -> Any:
        """The group of these ranks itself."""
        return self.groups[self.group(ranks)].handle

    def control_group(self, ledger: Ledger) -> str:
        """The name of a group on the CPU, in which the ranks of a ledger agree.

        Waits until all of them have made it: a wait of this kind ends with the next alarm, one of
        gloo for a rank that it has never met does not.
        """
        backend = None if self.is_fake else "gloo"
        name = f"{_ROOM}_{group_name(ledger.ranks, self.lane)}"
        self.named_group(ledger.ranks, name, backend)
        group = self.groups[name]
        if not (group.is_met or self.is_fake):
            latest = time.monotonic() + self.seconds
            keys = [f"ports/{group.key}/{rank}" for rank in ledger.ranks]
            while not self.store.check(keys):
                if ledger.stop or time.monotonic() > latest:
                    raise RuntimeError("timed out: a rank has not come to the group")
                time.sleep(0.01)
            if ledger.board.rings():  # gloo would wait long for a rank that has left the group
                raise RuntimeError("timed out: a rank has left the group")
            group.is_met = True
        return name

    def named_group(self, ranks: tuple[int, ...], name: str, backend: str | None = None) -> str:
        """The name of a group with these ranks in this order, made at its first use."""
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = _Group(ranks, name, backend)
            self._make(group)
        elif group.is_cut:
            self._make_anew(group)
        return name

    def _make(self, group: _Group) -> None:
        name = group.key
        with _MAKING:
            before = listening_ports()
            make_group(group.ranks, name, self.data_store, self.seconds, group.backend)
            if group.turn:
                renamed(name, group.name)
            group.ports = listening_ports() - before
        group.is_cut = group.is_met = False
        group.handle = c10d_group(group.name)
        self.store.set(f"ports/{name}/{self.rank}", ",".join(map(str, group.ports)))

    def _make_anew(self, group: _Group) -> None:
        group.turn += 1
        self._make(group)

    def abort(self, ranks: Sequence[int]) -> None:
        """Ends the waits of this process in the groups of some of these ranks, with errors."""
        with self.lock:
            for group in list(self.groups.values()):
                if set(group.ranks) <= set(ranks):
                    self._cut(group)

    def _cut(self, group: _Group) -> None:
        if not group.is_cut:
            group.is_cut = True
            shut(group.ports, self._ports_of_others(group))

    def renew(self, ranks: Sequence[int], error: str) -> None:
        """Makes the groups of some of these ranks anew, each once for an error of this name."""
        some = [group for group in self.groups.values() if set(group.ranks) <= set(ranks)]
        for group in some:
            if error not in group.errors:
                group.errors.add(error)
                with self.lock:
                    self._cut(group)
                self._make_anew(group)

    def _ports_of_others(self, group: _Group) -> set[int]:
        """The ports on which the other ranks of a group listen, of those that have said so."""
        ports: set[int] = set()
        with suppress(RuntimeError, OSError):
            for rank in group.ranks:
                key = f"ports/{group.key}/{rank}"
                if rank != self.rank and self.store.check([key]):
                    ports.update(map(int, filter(None, self.store.get(key).decode().split(","))))
        return ports

    # --- records -----------------------------------------------------------------------------

    def record(self) -> None:
        """Writes the last calls to the folder that the environment names, if it does."""
        folder = os.environ.get(FOLDER)
        if folder:
            with suppress(OSError):  # an error is on its way already
                write(self.rank, list(self.ledgers.values()), folder)

    # --- the end -----------------------------------------------------------------------------

    def leave(self, text: str) -> None:
        """Tells the other ranks that this process ends, by `text` if it is an error."""
        for ledger in self.ledgers.values():
            if ledger.number and not ledger.failed:
                ledger.left(text)
        self.store.set(f"gone/{self.rank}", text)
        self.store.set("gone", "")
        self.store.check(["gone"])  # the process must not end before the store has it

    def gone(self, ranks: Sequence[int]) -> dict[int, str]:
        """The ranks whose processes have ended, each with the error that ended it, if any."""
        if not self.store.check(["gone"]):
            return {}
        left = [rank for rank in ranks if self.store.check([f"gone/{rank}"])]
        return {rank: self.store.get(f"gone/{rank}").decode() for rank in left}
