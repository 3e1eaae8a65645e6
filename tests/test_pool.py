"""Tests of fdtensor/testing/pool.py: on real processes."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from fdtensor import errors
from fdtensor.testing.pool import GlooPool, WorkerError

pytestmark = pytest.mark.mesh


@pytest.fixture(scope="module")
def pool():
    with GlooPool(2, timeout=20, grace=1) as pool:
        yield pool


class Local:
    """A class of this module, which the workers cannot import."""

    def __init__(self, rank):
        self.rank = rank


def rank():
    return dist.get_rank()


def fail_on(ranks):
    if rank() in ranks:
        raise errors.LayoutError("no such layout.", layout="R", hint="Try again.")
    total = torch.ones(1)
    dist.all_reduce(total)


def pids(pool):
    return pool.run(os.getpid)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, seconds=10.0):
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


def test_results_come_in_rank_order(pool):
    assert pool.run(rank) == [0, 1]
    assert pool.run(lambda a, b: a + b + rank(), 10, 20) == [30, 31]


def test_an_all_reduce_adds_over_the_ranks(pool):
    def total(start):
        x = start + rank()
        dist.all_reduce(x)
        return x, torch.get_num_threads()

    for x, threads in pool.run(total, torch.arange(3)):
        assert torch.equal(x, torch.tensor([1, 3, 5]))
        assert threads == 1


def test_the_ranks_stay_up_between_calls(pool):
    assert pids(pool) == pids(pool)


def test_classes_of_a_test_module_go_there_and_back(pool):
    back = pool.run(lambda one: (type(one) is Local, Local(rank())), Local(3))
    assert [(same, type(local) is Local, local.rank) for same, local in back] == [
        (True, True, 0),
        (True, True, 1),
    ]


def one_of_each_op():
    aten = torch.ops.aten
    return [torch.ops, aten, aten.add, aten.add.Tensor, torch.ops.higher_order.cond]


def test_ops_of_torch_go_there_and_back(pool):
    for found in pool.run(one_of_each_op):
        assert all(a is b for a, b in zip(found, one_of_each_op(), strict=True))


def test_an_error_on_all_ranks_is_told_once_and_the_ranks_stay_up(pool):
    before = pids(pool)
    with pytest.raises(WorkerError) as raised:
        pool.run(fail_on, {0, 1})
    text = str(raised.value)
    assert text.splitlines()[0] == "ranks 0, 1 raised LayoutError: no such layout."
    assert text.count("Traceback") == 1
    assert text.count("in fail_on") == 1
    assert text.endswith("LayoutError: no such layout.\n\n  layout: R\n\nTry again.")
    assert sorted(raised.value.failures) == [0, 1]
    assert pids(pool) == before


def test_an_error_on_one_rank_does_not_leave_the_others_waiting(pool):
    before = pids(pool)
    start = time.monotonic()
    with pytest.raises(WorkerError) as raised:
        pool.run(fail_on, {1})
    assert time.monotonic() - start < 10
    first = "rank 1 raised LayoutError: no such layout.; rank 0 did not answer 1 s later"
    assert str(raised.value).splitlines()[0] == first
    assert list(raised.value.failures) == [1, 0]
    assert gone(before)
    assert pool.run(rank) == [0, 1]


def test_a_rank_that_dies_is_named_and_the_pool_starts_anew(pool):
    before = pids(pool)
    with pytest.raises(WorkerError, match="rank 1 exited with 3") as raised:
        pool.run(lambda: os._exit(3) if rank() else dist.barrier())
    assert raised.value.failures[1] == "exited with 3"
    assert gone(before)
    assert pool.run(rank) == [0, 1]


def test_a_rank_that_died_between_calls_is_named(pool):
    os.kill(pids(pool)[0], 9)
    with pytest.raises(WorkerError, match=r"^rank 0 died of SIGKILL$"):
        pool.run(rank)
    assert pool.run(rank) == [0, 1]


def test_a_call_that_takes_too_long_names_the_ranks_that_did_not_answer(pool):
    before = pids(pool)
    with pytest.raises(WorkerError, match=r"^rank 1 did not answer in 0.5 s$"):
        pool.run(lambda: time.sleep(60 * rank()), timeout=0.5)
    assert gone(before)


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_rank(pool):
    with pytest.raises(WorkerError, match=r"^ranks 0, 1 raised TypeError: cannot pickle"):
        pool.run(lambda: (i for i in range(3)))


def test_a_call_that_cannot_be_pickled_is_refused_here(pool):
    with pytest.raises(TypeError, match="cannot pickle"):
        pool.run(lambda x: x, (i for i in range(3)))
    assert pool.run(rank) == [0, 1]


def test_an_interrupt_stops_the_ranks(pool, monkeypatch):
    before = pids(pool)

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fdtensor.testing.pool.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.run(rank)
    assert gone(before)


@pytest.mark.parametrize("ending", ["pass", "os._exit(0)"])
def test_no_process_outlives_a_script_without_a_main_guard(tmp_path, ending):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + ending)
    ran = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stderr == ""
    assert gone([int(pid) for pid in ran.stdout.split()])


SCRIPT = """
import os
import torch.distributed as dist
from fdtensor.testing.pool import GlooPool

pool = GlooPool(2)
print(*[pid for pid, rank in pool.run(lambda: (os.getpid(), dist.get_rank()))], flush=True)
"""
