"""`in_child`: the trials in a child process, which may die of them."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import mmap
import os
import pickle
import resource
import select
import signal
import struct
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fdtensor.testing.discovery.sample import Sample
from fdtensor.testing.discovery.trial import Judged, Trial, judged

__all__ = ["in_child"]

SECONDS = 20.0
"""The limits of one attempt."""


def in_child(draws: Sequence[Sequence[Sample]], trials: Sequence[Trial]) -> Iterator[Judged]:
    """The verdicts of trials in child processes; a trial that kills a fresh one does not hold."""
    note = mmap.mmap(-1, 16)
    fatal: set[tuple[int, int]] = set()
    start, done = 0, False
    while not done:
        for message in _of_child(draws, trials, start, fatal, note):
            if isinstance(message, str):
                raise RuntimeError(message)
            done = message is None
            if message is not None:
                yield message
        number, phase = struct.unpack("qq", note[:16])
        if number == start:
            fatal.add((number, phase))
        start = number


def _of_child(
    draws: Sequence[Sequence[Sample]],
    trials: Sequence[Trial],
    start: int,
    fatal: set[tuple[int, int]],
    note: Any,
) -> list[Any]:
    """The messages of a child process before its end: None last where it did not die."""
    note[:16] = struct.pack("qq", start, 0)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has threads, which the child does not use
        pid = os.fork()
    if pid == 0:
        os.close(read)
        _child(write, lambda: judged(draws, trials, start, fatal, note))
    os.close(write)
    sent, before = b"", None
    try:
        while True:
            if select.select([read], [], [], SECONDS)[0]:
                more = os.read(read, 1 << 16)
                if not more:
                    break
                sent += more
            elif note[:16] == before:
                os.kill(pid, signal.SIGKILL)
            before = note[:16]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
    return _unpickled(sent)


def _child(write: int, judged: Callable[[], Iterator[Judged]]) -> None:
    """Sends what comes of the trials, and ends the process without a word of its death."""
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        torch.set_num_threads(1)
        with os.fdopen(write, "wb", buffering=0) as pipe:
            try:
                for verdict in judged():
                    pipe.write(pickle.dumps(verdict))
                pipe.write(pickle.dumps(None))
            except Exception:
                pipe.write(pickle.dumps(traceback.format_exc()))
    finally:
        os._exit(0)


def _unpickled(sent: bytes) -> list[Any]:
    stream, messages = io.BytesIO(sent), []
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            messages.append(pickle.load(stream))
    return messages
