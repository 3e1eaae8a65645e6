"""A rank that traces or plans is waited for beyond the timeout; one that does not is not."""

import threading
import time

import pytest
import torch

import fdtensor
from fdtensor import CommError, Mesh, connect, distribute, spmd
from fdtensor.runtime.control.places import at_work

pytestmark = pytest.mark.mesh


def _of_library(source: str) -> dict:
    """The names of some code that counts as the library's own."""
    names = {"time": time}
    exec(compile(source, fdtensor.__file__, "exec"), names)
    return names


WORK = _of_library("def work(seconds):\n    time.sleep(seconds)\n")["work"]


def rest(seconds):
    time.sleep(seconds)


def first_call(comm, factor, seconds, where):
    """The sum of a program's first call, to which rank 2 comes late."""
    x = distribute(torch.arange(8.0), comm.mesh.layout("x"), comm)
    if comm.rank == 2:
        where(seconds)
    try:
        return spmd(lambda x: (x * factor).sum())(x).item()
    except CommError as error:
        return str(error).partition("\n")[0]


def late(seconds, timeout):
    """What a first call gives where a rank is late for work, and for something else."""
    comm = connect(Mesh(x=4), timeout=timeout)
    return [first_call(comm, n, seconds, where) for n, where in enumerate((WORK, WORK, rest), 1)]


def test_ranks_wait_for_one_that_is_at_work_as_long_as_it_is(gloo_ranks):
    lost = "rank 2 did not come to what others waited for within 2 s."
    told = gloo_ranks(4).run(late, 5.0, 2.0, timeout=90)
    assert told == [[28.0, 56.0, lost]] * 4


def test_what_the_library_waits_for_and_what_users_do_is_no_work():
    def seen(function):
        thread = threading.Thread(target=function, args=(1.0,))
        thread.start()
        time.sleep(0.3)
        found = at_work(thread.ident)
        thread.join()
        return found, at_work(thread.ident)

    assert seen(WORK) == (True, False)
    assert seen(rest) == (False, False)
    assert seen(lambda seconds: WORK(seconds)) == (True, False)
    calls = _of_library("def calls(f, x):\n    f(x)\n")["calls"]
    assert seen(lambda seconds: calls(rest, seconds)) == (False, False)
