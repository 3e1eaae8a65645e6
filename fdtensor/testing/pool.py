"""`GlooPool`: real ranks on this machine, gloo processes that stay up and run functions."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fdtensor.testing.worker import Failure, failure, packed, search_path

__all__ = ["GlooPool", "WorkerError"]

T = TypeVar("T")

_START_SECONDS = 180.0
_BOOT = "import sys; sys.path[:] = {path}; from fdtensor.testing.worker import serve; serve({fd})"


class WorkerError(RuntimeError):
    """A call that failed on some ranks: one sentence, then the traceback of each that raised.

    `failures` holds what happened on each of those ranks, the first to fail first.
    """

    def __init__(self, sentence: str, failures: Mapping[int, str]) -> None:
        super().__init__(sentence, failures)
        self.sentence = sentence
        self.failures = failures

    def __str__(self) -> str:
        told = _grouped({rank: text for rank, text in self.failures.items() if "\n" in text})
        return "\n\n".join([self.sentence, *(f"On {ranks}:\n{text}" for ranks, text in told)])


@attrs.frozen
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection


class GlooPool:
    """`n` gloo ranks, each a process with one torch thread, started by the first `run`.

    `timeout` and `grace` are in seconds: how long a call may take, and how long the other ranks may
    go on when one has failed. A pool whose ranks may be out of step is stopped, and starts anew at
    the next `run`. Also a context manager; the processes end with it, with the pool or with Python.
    """

    def __init__(self, n: int, *, timeout: float = 60.0, grace: float = 5.0) -> None:
        self.n = n
        self.timeout = timeout
        self.grace = grace
        self._workers: list[_Worker] = []
        self._store: TCPStore | None = None
        weakref.finalize(self, _stop, self._workers)

    def run(self, fn: Callable[..., T], *args: object, timeout: float | None = None) -> list[T]:
        """What `fn(*args)` returns on each rank, in the order of the ranks.

        The default process group is up. Closures and functions of test modules travel by value.
        Raises `WorkerError` where a rank raises, dies or does not answer in time.
        """
        call = packed(fn, args)
        starting = not self._workers
        try:
            if starting:
                self._start()
                starting = False
            return self._call([call] * self.n, timeout or self.timeout)
        except BaseException as error:
            if starting or not isinstance(error, WorkerError):
                self.close()
            raise

    def close(self) -> None:
        """Stops the ranks; the next `run` starts new ones."""
        _stop(self._workers)
        self._store = None

    def __enter__(self) -> GlooPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        env = {"GLOO_SOCKET_IFNAME": loopback, **os.environ, "OMP_NUM_THREADS": "1"}
        for _ in range(self.n):
            ours, theirs = Pipe()
            with theirs:
                code = _BOOT.format(path=search_path(), fd=theirs.fileno())
                process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=env,
                    start_new_session=True,  # Ctrl-C reaches this process, which stops the others
                )
            self._workers.append(_Worker(process, ours))
        joins = [packed(_join, (rank, self.n, self._store.port)) for rank in range(self.n)]
        self._call(joins, _START_SECONDS)

    def _call(self, calls: Sequence[bytes], timeout: float) -> list[Any]:
        for worker, call in zip(self._workers, calls, strict=True):
            try:
                worker.pipe.send_bytes(call)
            except OSError:
                continue  # it is dead: reading its answer says so
        rank_of = {worker.pipe: rank for rank, worker in enumerate(self._workers)}
        answers: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        latest = deadline = time.monotonic() + timeout
        while rank_of and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(rank_of), left):
                rank = rank_of.pop(pipe)  # type: ignore[arg-type]
                answers[rank] = _read(self._workers[rank])
                if isinstance(answers[rank], Failure):
                    failures[rank] = answers[rank]
                    deadline = min(deadline, time.monotonic() + self.grace)
        limit = f"{self.grace:g} s later" if deadline < latest else f"in {timeout:g} s"
        late = f"did not answer {limit}"
        failures |= {rank: Failure(late, late) for rank in rank_of.values()}
        if not failures:
            return [answers[rank] for rank in range(self.n)]
        if len(failures) < self.n or not _in_step(failures.values()):
            self.close()
        said = _grouped({rank: failed.what for rank, failed in failures.items()})
        sentence = "; ".join(f"{ranks} {what}" for ranks, what in said)
        raise WorkerError(sentence, {rank: failed.text for rank, failed in failures.items()})


def _in_step(failures: Iterable[Failure]) -> bool:
    """Whether all ranks raised the same kind of error, so that none waits for another."""
    kinds = {failed.what.partition(":")[0] for failed in failures}
    return len(kinds) == 1 and kinds.pop().startswith("raised")


def _grouped(texts: Mapping[int, str]) -> list[tuple[str, str]]:
    """Each text, after the ranks that have it."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(rank)
    return [
        (f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}", text)
        for text, ranks in groups.items()
    ]


def _read(worker: _Worker) -> Any:
    """What the call returned on this worker, or the `Failure` that it was."""
    try:
        return pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, ConnectionError):
        worker.process.kill()  # no effect on one that is gone
        code = worker.process.wait()
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return Failure(how, how)
    except Exception as error:
        return failure(error)


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.pipe.close()
        worker.process.kill()
    for worker in workers:
        worker.process.wait()
    workers.clear()


def _join(rank: int, n: int, port: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
