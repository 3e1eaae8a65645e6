"""`Ledger`: the calls of this process on a set of ranks, in order, with a rolling fingerprint.

All ranks of the set must have the same ones. What a call adds costs a quarter of a microsecond; the
fingerprints are compared beside the data, by the watcher and where a value leaves.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from fdtensor.layouts.errors import CommError, FdtensorError
from fdtensor.layouts.torch_private import current_graph_task
from fdtensor.runtime.control.behind import catch_up
from fdtensor.runtime.control.board import Board
from fdtensor.runtime.control.causes import is_noted, is_of_network, note, told_of
from fdtensor.runtime.control.kept import KEPT, Entry, Record, entries
from fdtensor.runtime.control.noting import noting
from fdtensor.runtime.control.patience import Patience
from fdtensor.runtime.control.places import caller, line_of, raised_at, running
from fdtensor.runtime.control.posts import (
    Call,
    Kind,
    Post,
    described,
    of_other_thread,
    without_store,
)

if TYPE_CHECKING:
    from fdtensor.runtime.control.plane import Plane

__all__ = ["Ledger"]

T = TypeVar("T")

SHOWN = 32
"""How many of the last calls a post has."""


class Ledger:
    """The calls on `ranks`, which this process is one of.

    `number` is that of the last call that began, `done` that of the last that ended. `epoch` counts
    the errors that the ranks have come back from; calls are numbered anew after each.
    """

    __slots__ = (
        "__weakref__", "alarmed", "before", "behind", "board", "done", "ended", "epoch", "failed",
        "mark", "met", "name", "number", "patience", "plane", "ranks", "records", "stop", "thread",
        "whole",
    )  # fmt: skip

    def __init__(self, ranks: tuple[int, ...], name: str, plane: Plane) -> None:
        self.ranks = ranks
        self.name = name
        self.plane = plane
        self.thread = get_ident()
        """The thread that makes the calls."""
        self.patience: Patience | None = None
        """The end of the open call's wait for others; None where the network ends it."""
        self.whole = 0  # the calls of all epochs together
        self.epoch = -1
        self.before: list[Entry] = []  # the last calls of the epoch before this one
        self.behind: list[Ledger] = []
        """Those that have failed, and come before the next call of this one."""
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self.board = Board(self.plane.store, self.error_name)
        self.number = self.done = self.mark = 0
        self.records: list[Record | None] = [None] * KEPT
        self.ended = [0.0] * KEPT
        self.met: deque[int] = deque()
        """The calls whose fingerprints are on the board."""
        self.stop = bool(self.behind)
        """Whether something has gone wrong, which the next call tells."""
        self.alarmed = False
        """Whether that is an alarm of another rank."""
        self.failed = False
        """Whether this rank has raised its error about that."""

    @property
    def error_name(self) -> str:
        """The name of the error that ends this epoch."""
        return f"{self.name}/{self.epoch}"

    # --- calls -------------------------------------------------------------------------------

    def begin(self, fact: int, what: Any, sends: bool = True) -> None:
        """Notes a call: `fact` is what must be the same on all ranks, `what` tells it to people."""
        if self.stop or get_ident() != self.thread:
            self.halt()
        number = self.number = self.number + 1
        self.mark = mark = hash((self.mark, fact))
        self.plane.tag = mark & 0x3FFFFFFF
        place = caller() if sends else None
        self.records[number % KEPT] = (number, mark, what, place, time.time())

    def end(self) -> None:
        """Notes that the call has ended."""
        self.done = self.number
        self.plane.tag = 0
        self.ended[self.done % KEPT] = time.time()

    def noted(self, fact: int, what: Any, function: Callable[..., T], *args: Any) -> T:
        """The result of a function, as a call of its own."""
        return noting(self, fact, what, True, function)(*args)

    def meet(self, fact: int, what: Any) -> None:
        """Notes a call, and raises on all ranks where one of them has made other calls so far.

        A rank whose calls differ from those of the first one to come raises here, and with it those
        that wait for it in what they do next.
        """
        self.begin(fact, what)
        try:
            same = self.board.mark(self.number, self.mark) == self.mark
            self.met.append(self.number)
            if not same:
                self.board.ring("parted")
        except BaseException as error:
            raise self.failure(error)  # noqa: B904 - the same error, unless the network failed
        if not same:
            raise self._lost()
        self.end()

    # --- errors ------------------------------------------------------------------------------

    def failure(self, error: BaseException) -> BaseException:
        """The error to raise for one that came up in a call, or on the way to it.

        An error of the network becomes the one error of all ranks; any other stays, and the other
        ranks are told of it. One that all ranks have raised together changes nothing.
        """
        if getattr(error, "common", False):
            self.end()
            return error
        try:
            if is_of_network(error):
                return self._lost()
            self.tell(error, clean=self.number == self.done or isinstance(error, FdtensorError))
        except (RuntimeError, OSError) as gone:
            return self._without_board(error, gone)
        return error

    def tell(self, error: BaseException, clean: bool) -> None:
        """Tells the others of an error that came up on this rank, once."""
        interrupted = isinstance(error, KeyboardInterrupt)
        if self.failed:
            if interrupted or is_noted(error, self.error_name):
                self.end()
                return
            with suppress(CommError):  # another one, before any call after the last
                self._resume()
        if interrupted:
            self.fail("interrupted", "", clean=self.number == self.done)
        else:
            self.fail("raised", told_of(error), clean, raised_at(error))
        note(error, self.error_name)

    def halt(self) -> None:
        """Raises the error of all ranks; after it, waits until all of them have raised theirs."""
        unfit = self.plane.unfit()
        if unfit is not None:
            raise unfit
        if get_ident() != self.thread:
            self._handed_over()
        if self.behind:
            catch_up(self)
        if not self.stop:
            return
        if self.failed:
            self._resume()
        elif self.number >= self.reach():
            raise self._lost()

    def reach(self) -> int:
        """The last call that this rank still makes, after an error that another one has raised.

        That one had ended it, so nobody is missing in it; and an error that comes up on all ranks
        alike then comes up here too, where a late rank would only hear of it.
        """
        posts = self.board.posts(self.ranks).values()
        return min([post.done for post in posts if post.kind == "raised"], default=0)

    def _handed_over(self) -> None:
        """Lets this thread make calls, unless one that has made some is alive."""
        if current_graph_task() != -1:  # autograd has a thread for each accelerator
            return
        if self.whole + self.number and any(t.ident == self.thread for t in threading.enumerate()):
            raise of_other_thread(self.ranks)
        self.thread = get_ident()

    def _lost(self) -> CommError:
        """The one error of all ranks."""
        try:
            if not self.failed:
                self.fail("waiting", "", clean=False)
            error = self.board.account(self.ranks, self.plane.seconds).error()
        except (RuntimeError, OSError) as gone:
            error = self._without_board(None, gone)
        error.__suppress_context__ = True  # which has only the words of the network
        note(error, self.error_name)
        return error

    def fail(self, kind: Kind, text: str, clean: bool, line: str = "") -> None:
        """Tells the others that this rank raises an error, at a line of the user if it has one."""
        self.stop = self.failed = True
        clean = clean and not self.plane.groups.is_cut(self.ranks)
        self.plane.put_behind(self)
        self.plane.record()
        self.board.put(self.post(kind, text, line))
        self.board.ring(kind)
        self.board.come_back(self.plane.rank, clean)
        if not clean:
            self.plane.groups.abort(self.ranks)

    def told(self) -> None:
        """Notes that another rank has failed, and says for a busy thread where it is."""
        self.stop = self.alarmed = True
        if not self.failed:
            kind: Kind = "waiting" if self.number != self.done else "busy"
            self.board.put(self.post(kind, "" if self.epoch else "yet"))

    def answer_ahead(self) -> bool:
        """Tells others, if any have failed since this rank has, that it made no call."""
        later = Board(self.plane.store, f"{self.name}/{self.epoch + 1}")
        if rings := later.rings():
            later.put(Post(self.plane.rank, "busy", 0, running(self.thread)))
        return rings

    def left(self, text: str) -> None:
        """Tells the others that this process ends, by `text` if it is an error.

        It is a fault only where one of them has a call that this one has not.
        """
        self.board.put(self.post("ended", text))
        self.board.come_back(self.plane.rank, clean=False)

    def misses(self, rank: int, text: str) -> bool:
        """Whether a rank whose process has ended, by `text`, lacks the call that is open here."""
        post = self.board.posts([rank]).get(rank)
        if post is None:
            post = Post(rank, "ended", 0, text=text)
            self.board.put(post)
        return post.kind == "ended" and post.number < self.number

    def _without_board(self, error: BaseException | None, gone: BaseException) -> CommError:
        """The error where the store is gone, so that nobody hears of the others."""
        self.stop = self.failed = True
        self.plane.record()
        self.plane.groups.abort(self.ranks)
        return without_store(self.ranks, self.post("waiting", ""), str(error or gone))

    def post(self, kind: Kind, text: str, line: str = "") -> Post:
        """What this rank says of itself."""
        line = line or running(self.thread)
        calls = tuple(self.calls(SHOWN))
        return Post(self.plane.rank, kind, self.number, line, text, calls, self.done)

    def calls(self, most: int) -> Sequence[Call]:
        """The last calls, in order."""
        last = self.entries()[-most:]
        return [Call(n, mark, described(w), line_of(at)) for n, mark, w, at, *_ in last]

    def entries(self) -> list[Entry]:
        """The last calls of this epoch, in order, each with when it ended."""
        return entries(self.records, self.ended, self.done)

    # --- after errors ------------------------------------------------------------------------

    def anew(self, ranks: Sequence[int]) -> None:
        """Makes groups of some of its ranks anew, once these have raised; else raises itself."""
        try:
            back = self.board.all_back(ranks, self.plane.seconds)
        except (RuntimeError, OSError) as gone:
            raise self._without_board(None, gone) from None
        self.plane.groups.renew(self.error_name, back)

    def _resume(self) -> None:
        self.anew(self.ranks)
        self.renewed()

    def renewed(self) -> None:
        """Begins anew: all ranks have raised the same error, and know it."""
        self.whole += self.number
        self.before = self.entries()
        self._begin_epoch()
