"""Tests of testing/pool.py: a cluster for tests. Those of the cluster are its own."""

import time

import pytest
import torch
import torch.distributed as dist

from fdtensor.testing.pool import GlooPool, WorkerError

pytestmark = pytest.mark.mesh


def test_a_pool_adds_over_its_ranks(pool4):
    def total(start):
        x = start + dist.get_rank()
        dist.all_reduce(x)
        return x, torch.get_num_threads()

    for x, threads in pool4.run(total, torch.arange(3)):
        assert torch.equal(x, torch.tensor([6, 10, 14]))
        assert threads == 1


def test_a_pool_has_limits_and_no_labels(capfd):
    with GlooPool(1, timeout=0.5) as pool:
        pool.run(lambda: print("hello"), timeout=60)
        assert capfd.readouterr() == ("hello\n", "")
        with pytest.raises(WorkerError) as raised:
            pool.run(time.sleep, 60)
        assert raised.value.sentence == "rank 0 did not answer in 0.5 s"
    assert (GlooPool(2).timeout, GlooPool(2).grace) == (180.0, 5.0)
