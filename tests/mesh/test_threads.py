"""A Comm knows its process and thread: two in two threads work, others get an error at once."""

import os
import random
import threading

import pytest
import torch

import fdtensor as fd
from fdtensor.errors import CommError

pytestmark = pytest.mark.mesh

MESH = fd.Mesh(x=4)


def total(factor: int) -> float:
    """A sum over calls of all kinds, on a Comm of this thread."""
    comm = fd.connect(MESH)
    x = fd.distribute(torch.arange(8.0) * factor, MESH.layout("x"), comm)
    twice = fd.spmd(lambda x: (x * 2).sum())
    sums = 0.0
    for _ in range(20):
        sums += twice(x).full().item()
        sums += x.redistribute(MESH.layout()).local.sum().item()
    return sums


def totals() -> dict[int, float]:
    """Those of four threads, which start in another order on each rank."""
    out: dict[int, float] = {}
    threads = [
        threading.Thread(target=lambda k=k: out.update({k: total(k)}), name=f"thread {k}")
        for k in (1, 2, 3)
    ]
    random.Random(fd.connect(MESH).rank).shuffle(threads)
    for thread in threads:
        thread.start()
    out[0] = total(0)
    for thread in threads:
        thread.join()
    return out


def test_comms_of_several_threads_do_not_meet(pool4):
    assert pool4.run(totals) == [{k: 20 * 84.0 * k for k in range(4)}] * 4


def of_another_thread() -> str:
    x = fd.distribute(torch.arange(8.0), MESH.layout("x"), fd.connect(MESH))
    told = []

    def use():
        try:
            x.full()
        except CommError as error:
            told.append(str(error))

    thread = threading.Thread(target=use, name="reader")
    thread.start()
    thread.join()
    return told[0] + str(x.full().sum().item())


def test_a_comm_is_not_for_two_threads(pool4):
    for text in pool4.run(of_another_thread):
        assert text.startswith("thread 'reader' uses the Comm of another thread.")
        assert "Make a Comm in each thread" in text
        assert text.endswith("28.0")


def in_a_fork() -> str:
    """What a forked child is told, and the sum that its parent goes on with."""
    x = fd.distribute(torch.arange(8.0), MESH.layout("x"), fd.connect(MESH))
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            x.full()
        except BaseException as error:
            os.write(writes, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writes)
    with os.fdopen(reads) as told:
        return told.read() + str(x.full().sum().item())


def test_a_fork_is_no_rank(pool4):
    for text in pool4.run(in_a_fork):
        assert text.startswith("this process was forked from a rank, and is none itself.")
        assert text.endswith("28.0")
