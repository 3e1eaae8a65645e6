"""The worker at the far end of a pool's pipe: it runs every call that comes in and answers it.

A thread reads the pipe while the main thread computes. The worker ends when the pipe closes, even
in the middle of a collective, so none outlives the process that started it.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread

import attrs
import cloudpickle

__all__ = ["Failure", "failure", "serve"]


@attrs.frozen
class Failure:
    """What happened on a rank, as the end of a sentence, and the whole story."""

    what: str
    text: str


def failure(error: BaseException) -> Failure:
    """The failure of a rank that raised `error`: its kind and first line, and its traceback."""
    first = str(error).partition("\n")[0]
    return Failure(
        f"raised {type(error).__name__}" + (f": {first}" if first else ""),
        "".join(traceback.format_exception(error)).rstrip(),
    )


def serve(fd: int) -> None:
    """The life of a worker; `fd` is its end of the pipe."""
    pipe = Connection(fd)
    calls: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_listen, args=(pipe, calls), daemon=True).start()
    while True:
        pipe.send_bytes(_answer(calls.get()))


def _listen(pipe: Connection, calls: SimpleQueue[bytes]) -> None:
    try:
        while True:
            calls.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _answer(message: bytes) -> bytes:
    """What the call returns, or the `Failure` that it is, pickled."""
    try:
        sys.path[:], call = pickle.loads(message)
        fn, args = pickle.loads(call)
        return cloudpickle.dumps(fn(*args))
    except BaseException as error:
        if error.__traceback__ and error.__traceback__.tb_next:
            error.__traceback__ = error.__traceback__.tb_next  # without the frame of this function
        return pickle.dumps(failure(error))
    finally:
        sys.stdout.flush()
