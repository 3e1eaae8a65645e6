"""A rank: a process that runs every call that comes in and answers it, and `ThisRank`, its cluster.

A thread reads the pipe while the main thread computes, and says where that is when asked. The rank
ends when its pipes close, even in the middle of a collective, so none outlives its caller.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import linecache
import os
import pickle
import signal
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock, Thread, main_thread
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fdtensor.cluster.failures import failure
from fdtensor.cluster.meeting import store_in
from fdtensor.cluster.parcels import Block, Side, dumps, loads
from fdtensor.layouts.errors import CommError
from fdtensor.layouts.mesh import Mesh
from fdtensor.runtime.comm import Check
from fdtensor.runtime.funcol import FuncolComm
from fdtensor.tensors.dtensor import DTensor

__all__ = ["State", "ThisRank", "join", "serve", "this_rank"]


class State:
    """The attributes that functions keep on their rank from one call to the next."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"this rank keeps no {name!r}: set cluster.state.{name} in an earlier call; "
            "new ranks start with nothing."
        )


class ThisRank:
    """`cluster`, inside of a function that runs on a rank."""

    def __init__(self, rank: int, n: int) -> None:
        self.rank = rank
        self.n = n
        self.state = State()
        self._comms: dict[Side, FuncolComm] = {}

    def comm(self, mesh: Mesh, *, check: Check = "first") -> FuncolComm:
        """This rank's place on a mesh of the cluster's ranks: the same object at every call."""
        if (mesh, check) not in self._comms:
            self._comms[mesh, check] = FuncolComm(mesh, check=check)
        return self._comms[mesh, check]

    def __repr__(self) -> str:
        return f"<rank {self.rank} of a local cluster of {self.n}>"

    def __reduce__(self) -> Any:
        return this_rank, ()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"cluster.{name} is not for functions that run on a rank; "
            "they have cluster.comm(mesh), cluster.rank, cluster.n and cluster.state."
        )


_here: ThisRank | None = None


def this_rank() -> ThisRank:
    """The cluster of this process, which is a rank of it."""
    if _here is None:
        raise CommError(
            "a pickled cluster is the one of the rank that reads it, and this process is no rank.",
            hint="Use it inside of a function that cluster.run(fn) runs.",
        )
    return _here


def join(rank: int, n: int, place: str, threads: int) -> None:
    """Makes this process rank `rank` of `n`, with the default process group up."""
    global _here
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", store=store_in(place), rank=rank, world_size=n)
    _here = ThisRank(rank, n)


@attrs.frozen
class _Port:
    """The caller's end, to which two threads send."""

    pipe: Connection
    lock: Any = attrs.field(factory=Lock)

    def send(self, message: bytes) -> None:
        with self.lock:
            self.pipe.send_bytes(message)


def serve(calls: int, lifeline: int) -> None:
    """The life of a rank; the fds are its end of the pipe, and one that closes with the caller."""
    faulthandler.enable()  # of all threads: some of torch's have no Python to show
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _end_with(lifeline)
    port = _Port(Connection(calls))
    queue: SimpleQueue[tuple[bytes, bytes]] = SimpleQueue()
    Thread(target=_listen, args=(port, queue), daemon=True).start()
    while True:
        port.send(_answer(*queue.get()))


def _end_with(lifeline: int) -> None:
    """Has the system end this process, and what it has started, when the caller is gone.

    Also while an extension holds the GIL, when `_listen` cannot.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)


def _listen(port: _Port, queue: SimpleQueue[tuple[bytes, bytes]]) -> None:
    try:
        while True:
            if head := port.pipe.recv_bytes():
                queue.put((head, port.pipe.recv_bytes()))
            else:
                port.send(pickle.dumps(_place()))
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _place() -> str:
    """Where the call is, as the lines of a traceback; empty when there is none."""
    frames = traceback.extract_stack(sys._current_frames()[main_thread().ident or 0])
    names = [frame.name for frame in frames if frame.filename == __file__]
    if names[-1:] != ["_answer"]:
        return ""
    start = max(i for i, frame in enumerate(frames) if frame.filename == __file__)
    return "".join(traceback.format_list(frames[start + 1 :])).rstrip()


def _answer(head: bytes, body: bytes) -> bytes:
    """The result of the call, with the blocks of its DTensors, or its `Failure`."""
    try:
        sys.path[:], sources, blocks = pickle.loads(head)
        for file, lines in sources.items():
            linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
        tensors = [DTensor(block.local, block.type, _comm(block.side)) for block in blocks]
        fn, args = loads(body, tensors, _comm)
        result, pickler = dumps(fn(*args), FuncolComm)
        return pickle.dumps((result, [Block.of(x, x.local) for x in pickler.tensors]))
    except BaseException as error:
        pickled = b""
        with suppress(Exception):
            pickled, _ = dumps(error, FuncolComm)
        return pickle.dumps(failure(error, pickled))
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)


def _comm(side: Side) -> FuncolComm:
    mesh, check = side
    return this_rank().comm(mesh, check=check)
