"""The far end of a pool's pipe: a worker that runs every call that comes in and answers it.

A thread reads the pipe while the main thread computes. The worker ends when the pipe closes, even
in the middle of a collective, so none outlives the process that started it.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from operator import attrgetter
from queue import SimpleQueue
from threading import Thread
from typing import Any

import attrs
import cloudpickle
import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _OpNamespace

__all__ = ["Failure", "failure", "packed", "search_path", "serve"]


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


def packed(fn: Callable[..., object], args: Sequence[object]) -> bytes:
    """The call `fn(*args)` as a message to a worker, with where to import from.

    A function of a module that is neither installed nor of this package goes by value.
    """
    name = getattr(getattr(fn, "func", fn), "__module__", None) or ""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    root = name.partition(".")[0]
    known = {"fdtensor", "__main__", *sys.stdlib_module_names}
    local = file and "site-packages" not in file and root not in known
    if not local or name in cloudpickle.list_registry_pickle_by_value():
        return pickle.dumps((search_path(), _dumps((fn, args))))
    cloudpickle.register_pickle_by_value(module)
    try:
        return pickle.dumps((search_path(), _dumps((fn, args))))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):
    """Takes `torch.ops`, and what hangs from it, by name."""

    def reducer_override(self, obj: Any) -> Any:
        match obj:
            case _ if obj is torch.ops:
                return getattr, (torch, "ops")
            case _ if obj is torch.ops.higher_order:
                return getattr, (torch.ops, "higher_order")
            case _OpNamespace():
                return getattr, (torch.ops, obj.name)
            case OpOverloadPacket():
                return attrgetter(obj._qualified_op_name.replace("::", ".")), (torch.ops,)
            case OpOverload():
                return getattr, (obj.overloadpacket, obj._overloadname)
            case HigherOrderOperator():
                return getattr, (torch.ops.higher_order, obj.name())
            case _:
                return super().reducer_override(obj)


def _dumps(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def search_path() -> list[str]:
    """`sys.path`, good in any directory."""
    return [entry or os.getcwd() for entry in sys.path]


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
        return _dumps(fn(*args))
    except BaseException as error:
        if error.__traceback__ and error.__traceback__.tb_next:
            error.__traceback__ = error.__traceback__.tb_next  # without the frame of this function
        return pickle.dumps(failure(error))
    finally:
        sys.stdout.flush()
