"""`Plane`: the control plane of a process: its ledgers, and the process groups they watch over."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import ref

import torch.distributed as dist

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.torch_private import (
    default_store,
    local_store,
    prefixed,
    store_port,
)
from fdtensor.runtime.control.behind import put_behind
from fdtensor.runtime.control.flight import FOLDER, write
from fdtensor.runtime.control.groups import Groups
from fdtensor.runtime.control.ledger import Ledger
from fdtensor.runtime.control.sockets import limit_silence
from fdtensor.runtime.control.watcher import watch
from fdtensor.runtime.process_groups import SECONDS, group_name

__all__ = ["Plane"]

_ROOM = "fdtensor_control"

_LONG = 86400.0
"""The timeout in seconds of groups in which waits are ended from outside."""


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
        self.tag = 0
        """The tag of messages: the fingerprint of the open call, for which no other takes them."""
        self.is_fake = dist.get_backend() == "fake"
        """Whether the other ranks are made up, by torch's backend for tests: nobody waits then."""
        store = local_store() if self.is_fake else default_store()
        self.store = prefixed(store.clone(), f"{_ROOM}/{lane}" if lane else _ROOM)
        self.data_store = store.clone()
        self.ledgers: dict[tuple[int, ...], Ledger] = {}
        board = None if self.is_fake else self.store
        self.groups = Groups(self.rank, lane, self.data_store, board, self._is_stopped)
        self.wait_for(SECONDS)
        self.end_watch: Callable[[], None] = lambda: None
        if not self.is_fake:
            self.end_watch = watch(self)

    @property
    def seconds(self) -> float:
        """How long ranks wait for each other."""
        return self.groups.seconds

    def wait_for(self, seconds: float) -> None:
        """Sets how long ranks wait for each other, and this one for its store."""
        self.groups.wait_for(seconds)
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
        with suppress(RuntimeError, OSError):  # without its store nobody hears of it
            self.ledger(ranks).tell(error, clean=False)

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

    def control_group(self, ledger: Ledger) -> str:
        """The name of a group on the CPU, in which the ranks of a ledger agree.

        Waits in it do not end by themselves: the watcher ends them when `ledger.patience` is over.
        """
        backend = None if self.is_fake else "gloo"
        name = f"{_ROOM}_{group_name(ledger.ranks, self.lane)}"
        self.groups.named(ledger.ranks, name, backend, _LONG)
        if name in self.groups.unmet:
            self.groups.meet(name)
            if ledger.board.rings():  # gloo would wait long for a rank that has left the group
                raise RuntimeError("timed out: a rank has left the group")
        return name

    def _is_stopped(self) -> bool:
        """Whether a call is open that has to end, for an error of another rank."""
        some = [x for x in list(self.ledgers.values()) if x.number != x.done]
        return any(ledger.stop and not ledger.failed for ledger in some)

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
