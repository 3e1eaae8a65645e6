"""`LocalCluster`: ranks on this machine that stay up, and run functions of the caller."""

from __future__ import annotations

import math
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from fdtensor.cluster.answers import listen, places
from fdtensor.cluster.failures import Failure, WorkerError, grouped, in_step
from fdtensor.cluster.meeting import meeting_place, remove
from fdtensor.cluster.parcels import Block, Call, Side, assembled, loads, packed
from fdtensor.cluster.processes import Worker, start, stop
from fdtensor.cluster.worker import State, join, this_rank
from fdtensor.layouts.errors import CommError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.progress import working
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.words import a_kind, first_sentence
from fdtensor.runtime.comm import Check
from fdtensor.runtime.simulator import SimulatedComm

if TYPE_CHECKING:
    from fdtensor.runtime.funcol import FuncolComm

__all__ = ["LocalCluster", "local_cluster"]

T = TypeVar("T")
C = TypeVar("C", bound="LocalCluster")

_START_SECONDS = 180.0


@named_arguments
def local_cluster(
    n: int,
    *,
    timeout: float | None = None,
    threads: int = 1,
    env: Mapping[str, str] | None = None,
    labels: bool = True,
) -> LocalCluster:
    """A cluster of `n` real ranks on this machine, which the first `run` starts.

    Each rank is a gloo process with `threads` torch threads and the environment of this one and
    `env`. `timeout` is how many seconds a call may take, by default as long as it likes. What ranks
    print comes out where `run` was called, behind their numbers; without `labels`, as it is, on the
    streams of this process. Linux, where ranks are forks of a process that has torch imported, so
    that a second cluster is there at once; and macOS, where each is a new interpreter.

    >>> with local_cluster(2) as ranks:
    ...     print(ranks.run(lambda: connect(Mesh(x=2)).rank))
    [0, 1]
    """
    return LocalCluster(n, timeout=timeout, threads=threads, env=env, labels=labels)


class LocalCluster:
    """`n` real ranks on this machine: `local_cluster` makes one.

    Inside of the functions that it runs, `cluster.comm(mesh)` is the rank's place on a mesh,
    `cluster.rank` its number, and `cluster.state` keeps things on it from one call to the next.
    Also a context manager; the processes end with it, with `close` or with Python. `grace` is how
    many seconds the other ranks may go on when one has failed.

    >>> with fd.cluster.LocalCluster(2) as cluster:
    ...     print(cluster.map(lambda n: n * 10 + cluster.rank, [1, 2]))
    [10, 21]
    """

    def __init__(
        self,
        n: int,
        *,
        timeout: float | None = None,
        grace: float = 5.0,
        threads: int = 1,
        env: Mapping[str, str] | None = None,
        labels: bool = True,
    ) -> None:
        if not isinstance(n, int) or n < 1:
            raise CommError(f"a cluster has 1 rank or more, not {n!r}.", hint="Pass their number.")
        self.n = n
        self.timeout = timeout
        self.grace = grace
        self.threads = threads
        self.env: dict[str, str] = dict(env or {})
        self.labels = labels
        self._workers: list[Worker] = []
        self._places: list[str] = []
        self._comms: dict[Side, SimulatedComm] = {}
        self._lock = threading.RLock()
        weakref.finalize(self, remove, self._places, os.getpid())
        weakref.finalize(self, stop, self._workers, os.getpid())  # runs first

    def run(self, fn: Callable[..., T], *args: object, timeout: float | None = None) -> list[T]:
        """The results of `fn(*args)` on each rank, in the order of the ranks.

        The default process group is up. Functions of notebooks, scripts and modules that are not
        installed travel by value, closures included; what they import is imported on the rank.
        A DTensor of a simulated mesh arrives as the rank's block, on a real one; a DTensor that all
        ranks return comes back as a simulated one, the same in all places of the list.
        Raises `WorkerError` where a rank raises, dies or does not answer in time.
        """
        __tracebackhide__ = True
        return self._results([self._packed(fn, args)] * self.n, timeout)

    def map(
        self, fn: Callable[..., T], *values: Sequence[object], timeout: float | None = None
    ) -> list[T]:
        """`run` with arguments of each rank's own: rank `i` gets `fn(*[v[i] for v in values])`."""
        __tracebackhide__ = True
        for column in values:
            if len(column) != self.n:
                raise CommError(
                    f"cluster.map was given {len(column)} values for {self.n} ranks.",
                    hint="Pass one value a rank, or cluster.run(fn, value) to give all the same.",
                )
        arguments = zip(*values, strict=True) if values else [()] * self.n
        return self._results([self._packed(fn, args) for args in arguments], timeout)

    def comm(self, mesh: Mesh, *, check: Check = "first") -> FuncolComm:
        """The rank's place on a mesh of the cluster's ranks, inside of a function that they run.

        The same object at every call. Raises `CommError` for a mesh with more ranks.
        """
        raise _elsewhere("comm(mesh)", "Here, SimulatedComm(mesh) has all ranks in this process.")

    @property
    def rank(self) -> int:
        """The number of the rank, inside of a function that it runs."""
        raise _elsewhere("rank")

    @property
    def state(self) -> State:
        """The attributes that the rank keeps, inside of a function that it runs."""
        raise _elsewhere("state")

    def close(self) -> None:
        """Stops the ranks; the next `run` starts new ones."""
        stop(self._workers, os.getpid())
        remove(self._places, os.getpid())

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        gone = any(worker.process.poll() is not None for worker in self._workers)
        how = "a rank has ended" if gone else "up" if self._workers else "not started"
        return f"<local cluster of {self.n} rank{'s' * (self.n > 1)}: {how}>"

    def __reduce__(self) -> Any:
        return this_rank, ()

    def __copy__(self) -> LocalCluster:
        return self

    def __deepcopy__(self, memo: object) -> LocalCluster:
        return self

    def _packed(self, fn: Callable[..., object], args: Sequence[object]) -> Call:
        if not callable(fn):
            raise CommError(
                f"the ranks call a function, not {a_kind(fn)}.",
                hint="Write cluster.run(fn, *args): each rank calls fn(*args).",
            )
        try:
            call = packed(fn, args)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise CommError(
                f"a function or an argument of it cannot travel: {first_sentence(error)}.",
                hint="Pass values that can be pickled, or make the others on the rank.",
            ) from error
        self._comms |= call.comms  # what comes back on their mesh is on them again
        return call

    def _results(self, calls: Sequence[Call], timeout: float | None) -> list[Any]:
        __tracebackhide__ = True
        with self._lock:
            answers = self._outcome(calls, timeout or self.timeout or math.inf)
        if isinstance(answers, WorkerError):
            raise answers
        tensors = assembled([blocks for _, blocks in answers], self._simulated)
        return [
            loads(result, own, self._simulated)
            for (result, _), own in zip(answers, tensors, strict=True)
        ]

    def _simulated(self, side: Side) -> SimulatedComm:
        mesh, check = side
        return self._comms.setdefault(side, SimulatedComm(mesh, check=check))

    def _outcome(
        self, calls: Sequence[Call], timeout: float
    ) -> list[tuple[bytes, list[Block]]] | WorkerError:
        """The answers of all ranks, or the error; ranks that may be out of step are stopped."""
        __tracebackhide__ = True
        try:
            if not self._workers:
                with working(f"starting {self.n} ranks"):
                    failed = self._start()
                if failed:
                    return failed
            return self._ask(calls, timeout)
        except KeyboardInterrupt as interrupt:
            self._interrupted()
            raise interrupt.with_traceback(None) from None
        except BaseException:
            self.close()
            raise

    def _start(self) -> WorkerError | None:
        place = meeting_place(self._places)
        start(self._workers, self.n, self.threads, self.env, self.labels)
        joins = [packed(join, (rank, self.n, place, self.threads)) for rank in range(self.n)]
        outcome = self._ask(joins, _START_SECONDS)
        if not isinstance(outcome, WorkerError):
            return None
        self.close()
        return WorkerError(f"the ranks did not start: {outcome.sentence}", outcome.failures)

    def _interrupted(self) -> None:
        """Stops the ranks and says where they were."""
        try:
            where = places(self._workers, range(len(self._workers)))
        finally:
            self.close()
        lines = [f"On {ranks}, most recent call last:\n{text}" for ranks, text in grouped(where)]
        text = "interrupted: the ranks are stopped, and what they kept is lost."
        print("\n".join([text, *lines]), file=sys.stderr, flush=True)

    def _ask(
        self, calls: Sequence[Call], timeout: float
    ) -> list[tuple[bytes, list[Block]]] | WorkerError:
        heads = [call.head(rank) for rank, call in enumerate(calls)]
        for worker, head, call in zip(self._workers, heads, calls, strict=True):
            try:
                worker.pipe.send_bytes(head)
                worker.pipe.send_bytes(call.body)
            except OSError:
                continue  # it is dead: reading its answer says so
        answers, limit = listen(self._workers, timeout, self.grace)
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        failures = dict(sorted(failures.items(), key=lambda item: item[1].raised != ""))
        late = [rank for rank in range(self.n) if rank not in answers]
        where = places(self._workers, late)
        for rank in late:
            place = (
                f"; it was here (most recent call last):\n{where[rank]}" if rank in where else ""
            )
            failures[rank] = Failure(f"did not answer {limit}", f"did not answer {limit}{place}")
        if not failures:
            return [answers[rank] for rank in range(self.n)]
        lost = len(failures) < self.n or not in_step(failures.values())
        if lost:
            self.close()
        return self._error(failures, lost)

    def _error(self, failures: Mapping[int, Failure], lost: bool) -> WorkerError:
        groups = grouped({rank: failed.what for rank, failed in failures.items()})
        sentence = "; ".join(f"{ranks} {what}" for ranks, what in groups)
        texts = {rank: failed.text for rank, failed in failures.items()}
        errors = {}
        for rank, failed in failures.items():
            with suppress(Exception):
                errors[rank] = loads(failed.error, [], self._simulated)
        return WorkerError(sentence, texts, errors, lost)


def _elsewhere(name: str, more: str = "") -> CommError:
    return CommError(
        "this process is not a rank of the cluster.",
        hint=f"Use cluster.{name} inside of a function that cluster.run(fn) runs. {more}".strip(),
    )
