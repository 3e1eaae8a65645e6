"""`interleaved`: calls timed in turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Counted", "interleaved", "once", "one_thread", "ratio"]

Call = Callable[[], Any]

_SILENT = {"wait_tensor", "_wrap_tensor_autograd", "barrier"}


def interleaved(calls: Mapping[str, Call], rounds: int, count: int) -> dict[str, list[float]]:
    """The microseconds that each call takes in each round: the mean of `count` calls in a loop.

    Every round starts with another call; one round goes before those that count.
    """
    names = list(calls)
    taken: dict[str, list[float]] = {name: [] for name in names}
    with _uncollected():
        for i in range(rounds + 1):
            first = i % len(names)
            for name in names[first:] + names[:first]:
                call = calls[name]
                start = time.perf_counter()
                for _ in range(count):
                    call()
                us = 1e6 * (time.perf_counter() - start) / count
                if i:
                    taken[name].append(us)
    return taken


def once(call: Call) -> float:
    """The microseconds of one call."""
    with _uncollected():
        start = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - start)


def ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """The median of the ratios of the rounds."""
    return median(a / b for a, b in zip(these, those, strict=True))


@contextmanager
def one_thread() -> Iterator[None]:
    """With one thread of torch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class Counted(TorchDispatchMode):
    """While active, counts calls of ops on plain tensors, and the collectives among them."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.collectives = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(t, TorchDTensor) for t in types):
            return NotImplemented  # what it does on its blocks comes by again
        if func.namespace in ("c10d", "_c10d_functional"):
            self.collectives += func._opname not in _SILENT
        elif func.namespace == "aten":
            self.ops += 1
        return func(*args, **(kwargs or {}))

    @classmethod
    def during(cls, call: Call) -> tuple[int, int]:
        """The ops and the collectives of one call."""
        with cls() as counted, torch.enable_grad():
            call()
        return counted.ops, counted.collectives
