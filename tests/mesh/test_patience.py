"""A rank that plans is waited for beyond the timeout; one that does anything else is not."""

import gc
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from fdtensor import CommError, Mesh, connect, distribute, spmd, trace
from fdtensor.layouts.planning import is_planning, planning
from fdtensor.plans import cost
from fdtensor.runtime.control import patience, watcher

pytestmark = pytest.mark.mesh


def first_call(comm, factor, seconds, block):
    """The sum of a program's first call, to which rank 2 comes late, out of a block."""
    x = distribute(torch.arange(8.0), comm.mesh.layout("x"), comm)
    if comm.rank == 2:
        with block():
            time.sleep(seconds)
    try:
        return spmd(lambda x: (x * factor).sum())(x).item()
    except CommError as error:
        return str(error).partition("\n")[0]


def late(seconds, timeout):
    """What a first call gives where a rank is late because it plans, and for something else."""
    comm = connect(Mesh(x=4), timeout=timeout)
    blocks = enumerate((planning, planning, nullcontext), 1)
    return [first_call(comm, n, seconds, block) for n, block in blocks]


def test_ranks_wait_for_one_that_plans_as_long_as_it_does(gloo_ranks):
    lost = "rank 2 did not come to what others waited for within 2 s."
    told = gloo_ranks(4).run(late, 5.0, 2.0, timeout=90)
    assert told == [[28.0, 56.0, lost]] * 4


class Store:
    """A store that counts; without `lives` every call raises, as where its process has ended."""

    def __init__(self):
        self.count, self.lives = 0, True

    def add(self, key, n):
        if not self.lives:
            raise RuntimeError("the store is gone")
        self.count += n
        return self.count


def test_patience_begins_anew_while_some_rank_plans(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.time, time=100.0)
    monkeypatch.setattr(patience, "time", clock)
    store = Store()
    wait = patience.Patience(store, 2.0)
    for clock.time in (101.0, 101.9):
        assert not wait.is_over()
    patience.tell_of_planning(store)
    for clock.time in (102.5, 104.4):
        assert not wait.is_over()
    clock.time = 104.8
    assert wait.is_over()


def test_a_wait_is_over_where_nobody_can_be_heard():
    store = Store()
    ledger = SimpleNamespace(patience=None)
    assert not watcher._is_out_of_patience(ledger)
    ledger.patience = patience.Patience(store, 60.0)
    ledger.patience.next = 0.0
    assert not watcher._is_out_of_patience(ledger)
    store.lives, ledger.patience.next = False, 0.0
    assert watcher._is_out_of_patience(ledger)


def states():
    """Whether this process plans, and whether garbage is collected."""
    return is_planning(), gc.isenabled()


def test_choosing_is_planning_and_the_function_is_not(monkeypatch):
    seen = []
    price = cost.seconds

    def priced(step, model):
        seen.append(states())
        return price(step, model)

    def f(x):
        seen.append(states())
        return torch.sort(x).values

    monkeypatch.setattr("fdtensor.plans.search.seconds", priced)
    x = torch.zeros(173, 5)
    trace(f, distribute(x, Mesh(x=4).layout("x"), connect(Mesh(x=4))))
    assert seen[0] == states() == (False, True)
    assert set(seen[1:]) == {(True, False)}


def test_planning_ends_where_it_began():
    def fails():
        with planning():
            with planning():
                assert states() == (True, False)
            assert states() == (True, False)
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        fails()
    assert states() == (False, True)
    gc.disable()
    try:
        with planning():
            pass
        assert states() == (False, False)
    finally:
        gc.enable()
