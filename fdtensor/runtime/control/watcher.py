"""The watcher: a thread of each process that looks at the boards of its ledgers.

It compares fingerprints, hears of errors on other ranks, answers for a main thread that is busy,
and ends waits that cannot end well: after an error of another rank, and after Ctrl-C.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import attrs

from fdtensor.layouts.planning import is_planning
from fdtensor.runtime.control.kept import KEPT
from fdtensor.runtime.control.ledger import Ledger
from fdtensor.runtime.control.patience import tell_of_planning

if TYPE_CHECKING:
    from fdtensor.runtime.control.plane import Plane

__all__ = ["EVERY", "watch"]

TICK = 0.25
"""Seconds between two looks while a call is open; a quarter as often where none is."""

PATIENCE = 0.5
"""Seconds for a call to end by itself once another rank has failed, or the user wants it to."""

EVERY = KEPT // 2
"""How many calls apart fingerprints are compared where no call waits."""

_MARKS = 16
"""How many fingerprints of this rank stay on the board."""


@attrs.define(eq=False)
class _Seen:
    """What the watcher knows of a ledger."""

    epoch: int = -1
    number: int = 0
    since: float = 0.0
    """When it saw that number first."""
    compared: int = 0
    """The last call whose fingerprint was compared."""
    rung: float = 0.0
    """When it heard of an error; 0 where of none."""
    looked: float = 0.0
    """When it looked at the board last."""
    told: bool = False
    """Whether it has told others that this rank has made no call since its last error."""


def watch(plane: Plane) -> Callable[[], None]:
    """Starts the thread, which ends with the plane; the function that ends it at once.

    It must have ended before Python does, which may find it waiting for the store and abort.
    """
    wake = _woken_by_signals() if threading.current_thread() is threading.main_thread() else None
    ending = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(ref(plane), wake, ending), name="fdtensor watcher", daemon=True
    )
    thread.start()

    def end() -> None:
        ending.set()
        if wake is not None:
            os.write(wake[1], b"\0")
        thread.join()

    return end


@functools.cache
def _woken_by_signals() -> tuple[int, int] | None:
    """The ends of a pipe that gets the number of each signal that the main thread has to handle.

    None where another one has them: an event loop, which is interrupted by itself.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    os.set_blocking(reads, False)
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    if before == -1:
        return reads, writes
    signal.set_wakeup_fd(before)
    os.close(reads)
    os.close(writes)
    return None


def _watch(of: ref[Plane], wake: tuple[int, int] | None, ending: threading.Event) -> None:
    known: WeakKeyDictionary[Ledger, _Seen] = WeakKeyDictionary()
    interrupted = 0.0
    while not ending.is_set():
        if wake is None:
            ending.wait(TICK)
        elif select.select([wake[0]], [], [], TICK)[0]:
            with suppress(BlockingIOError):  # the thread of an earlier plane has read it
                if signal.SIGINT in os.read(wake[0], 4096):
                    interrupted = time.monotonic()
        plane = of()
        if ending.is_set() or plane is None or plane.unfit() is not None:
            break
        for ledger in list(plane.ledgers.values()):
            with suppress(RuntimeError, OSError):  # without its store, other waits end themselves
                _look(ledger, known.setdefault(ledger, _Seen()))
        interrupted = _interrupt(plane, interrupted)
        if is_planning():
            with suppress(RuntimeError, OSError):
                tell_of_planning(plane.store)
        del plane


def _interrupt(plane: Plane, since: float) -> float:
    """Ends the waits of an open call that Ctrl-C does not reach; since when that is to be."""
    if not since or time.monotonic() < since + PATIENCE:
        return since
    for ledger in list(plane.ledgers.values()):
        if ledger.number != ledger.done and not ledger.failed:
            with suppress(RuntimeError, OSError):
                ledger.fail("interrupted", "", clean=False)
    return 0.0


def _look(ledger: Ledger, seen: _Seen) -> None:
    now = time.monotonic()
    if seen.epoch != ledger.epoch:
        seen.epoch, seen.number, seen.compared, seen.rung = ledger.epoch, 0, 0, 0.0
        seen.told = False
    number = ledger.number
    if seen.number != number:
        seen.number, seen.since = number, now
    is_open = number != ledger.done
    if is_open and _is_out_of_patience(ledger):
        ledger.plane.groups.abort(ledger.ranks)
    if ledger.failed and not seen.told and now - seen.looked >= TICK:
        seen.looked, seen.told = now, ledger.answer_ahead()
    if ledger.failed:
        return
    if is_open and now - seen.since >= TICK and seen.compared < number:
        _compare(ledger, seen, number)
    elif seen.compared < number // EVERY * EVERY:
        _compare(ledger, seen, number // EVERY * EVERY)
    while len(ledger.met) > _MARKS:
        ledger.board.forget(ledger.met.popleft())
    if not seen.rung and now - seen.looked >= (TICK if is_open else 4 * TICK):
        seen.looked = now
        if ledger.board.rings() or (is_open and _one_has_left(ledger)):
            seen.rung = now
            ledger.told()
    if seen.rung and is_open and now - max(seen.rung, seen.since) >= PATIENCE:
        ledger.plane.groups.abort(ledger.ranks)


def _is_out_of_patience(ledger: Ledger) -> bool:
    """Whether the open call has waited long enough for others."""
    patience = ledger.patience
    try:
        return patience is not None and patience.is_over()
    except (RuntimeError, OSError):
        return True  # without the store nobody hears of the others


def _one_has_left(ledger: Ledger) -> bool:
    """Whether the process of a rank has ended without the open call; tells the others."""
    for rank, text in ledger.plane.gone(ledger.ranks).items():
        if ledger.misses(rank, text):
            ledger.board.ring("ended")
            return True
    return False


def _compare(ledger: Ledger, seen: _Seen, number: int) -> None:
    """Compares the fingerprints of the calls up to `number`; an alarm where they differ."""
    record: Any = ledger.records[number % KEPT]
    seen.compared = number
    if record is None or record[0] != number or len(ledger.ranks) == 1:
        return
    if ledger.board.mark(number, record[1]) != record[1]:
        ledger.board.ring("parted")
        return
    ledger.met.append(number)
