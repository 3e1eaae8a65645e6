"""What a process holds does not grow with what it has done: memory, descriptors and threads.

Each kind of work is done `count` times to fill what is kept, and as often again, after which as
much is held as before. The bounds of what is kept are low, so that few times fill it.
"""

import contextlib
import ctypes
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import attrs
import pytest
import torch

import fdtensor as fd
from fdtensor import Mesh, connect, distribute, spmd
from fdtensor.layouts import remembered
from fdtensor.runtime.control.kept import KEPT
from fdtensor.testing import GlooPool
from tests.support.depth import times

MESH = Mesh(x=2)

MEGABYTES = 24
"""By how much the memory of a process may grow meanwhile: pieces of freed memory lie about."""

OBJECTS = 1_000
"""By how many objects: fewer than a program has for each time that the work is done."""


@attrs.frozen
class Held:
    """What a process holds."""

    objects: int
    megabytes: float
    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> "Held":
        remembered.forget()
        gc.collect()
        with contextlib.suppress(AttributeError):  # of glibc
            ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        threads = len(os.listdir("/proc/self/task")) - threading.active_count()
        descriptors = len(os.listdir("/proc/self/fd"))
        return cls(len(gc.get_objects()), megabytes, descriptors, threads)


def tensor(comm, rows=4, requires_grad=False):
    x = torch.randn(rows, 6, requires_grad=requires_grad)
    return distribute(x, MESH.layout("x"), comm)


def redistributions(comm, numbers: range) -> Iterator[None]:
    for i in numbers:
        yield tensor(comm, 4 + i % 3).redistribute(MESH.layout(None, "x"))


def programs(comm, numbers: range) -> Iterator[None]:
    f = spmd(lambda x: torch.relu(x @ x.mT).sum(0))
    for i in numbers:
        yield f(tensor(comm, 4 + i))


def closures(comm, numbers: range) -> Iterator[None]:
    x, y = tensor(comm), tensor(comm, requires_grad=True)
    for i in numbers:
        by = torch.full((6,), float(i))
        yield fd.call(lambda x, by=by: x * by, x)
        yield fd.call(lambda x: x * by, x)  # noqa: B023
        yield spmd(lambda x: x + by)(x)  # noqa: B023
        yield fd.call(lambda x: (x * x * by).sum(), y)  # noqa: B023


def connects(comm, numbers: range) -> Iterator[None]:
    double, f = (lambda x: x + x), spmd(torch.sin)
    for _ in numbers:
        comm = connect(comm.mesh)
        x = tensor(comm)
        yield fd.call(double, x), fd.call(torch.add, x, x), f(x)
        yield x.redistribute(MESH.layout()), fd.call(torch.sum, tensor(comm, requires_grad=True))


WORK = {
    redistributions: (300, 20_000),
    programs: (15, 2_000),
    closures: (10, 5_000),
    connects: (40, 1_000),
}
"""Kinds of work, with how often each is done, by default and in a deep run."""


def growth(work, count: int) -> tuple[Held, Held]:
    """What a process holds once it has done some work, and once it has done the same again."""
    kept, calls = "tensors.calls.kept", "tensors.calls.functions"
    places = (f"{kept}.CACHED", f"{calls}.CACHED", f"{kept}._COMMS", "ops.recorder._FAKES")
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(mock.patch(f"fdtensor.{place}", 4))
        comm, held = connect(MESH), []
        x = tensor(comm)
        for _ in range(KEPT):  # of which a rank keeps a record
            fd.call(torch.neg, x)
        for start in (0, count):
            for _ in work(comm, range(start, start + count)):
                pass
            held.append(Held.now())
    return held[0], held[1]


def check(before: Held, after: Held) -> None:
    assert after.objects - before.objects < OBJECTS
    assert after.megabytes - before.megabytes < MEGABYTES
    assert after.descriptors <= before.descriptors
    assert after.threads <= before.threads


pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_what_a_process_holds_does_not_grow_with_what_it_has_done(work):
    check(*growth(work, times(*WORK[work])))


def test_what_a_rank_holds_does_not_grow_with_what_it_has_done():
    with GlooPool(2, timeout=6000) as pool:
        for work, counts in WORK.items():
            for held in pool.run(growth, work, times(*counts)):
                check(*held)


def test_a_function_that_nobody_holds_goes_with_its_tensors_at_once():
    comm = connect(MESH)
    x, y = tensor(comm), tensor(comm, requires_grad=True)

    def used(run) -> weakref.ref:
        by = torch.randn(6)
        run(lambda x: x * by)
        return weakref.ref(by)

    ways = {
        "call": lambda f: fd.call(f, x),
        "spmd": lambda f: spmd(f)(x),
        "call with gradients": lambda f: fd.call(f, y),
        "spmd with gradients": lambda f: spmd(f)(y),
    }
    for run in ways.values():
        used(run)  # what a first call sets up may wait for the garbage collector
    gc.collect()
    gc.disable()
    try:
        held = [name for name, run in ways.items() if used(run)() is not None]
    finally:
        gc.enable()
    assert not held


def test_a_function_that_derivatives_need_lives_as_long_as_they_do():
    comm = connect(MESH)
    x = tensor(comm, requires_grad=True)
    y = fd.call(lambda x: (x**4).sum(), x)
    gc.collect()
    leaves = list(x.local)
    first = torch.autograd.grad(y.local, leaves, [torch.ones(())] * 2, create_graph=True)
    second = torch.autograd.grad([g.sum() for g in first], leaves, create_graph=True)
    del y, first
    gc.collect()
    third = torch.autograd.grad([g.sum() for g in second], leaves)
    expected = 24 * torch.cat([leaf.detach() for leaf in leaves])
    torch.testing.assert_close(torch.cat(third), expected)


def test_results_are_forgotten_when_they_are_many(monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 50)
    monkeypatch.setattr(remembered, "_functions", [])
    square = remembered.remembered(1000)(lambda x: x * x)
    remembered.forget()
    for i in range(1, 1000):
        assert square(i) == square(i) == i * i
        assert square.cache_info().currsize <= 51
