"""What one rank alone raises, and catches: all ranks hear of it, and are at the same call after."""

import threading
from contextlib import nullcontext, suppress
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

from fdtensor import CommError, Mesh, connect, distribute, fail_together, local_cluster, shard_map

pytestmark = pytest.mark.mesh

STEPS = 5


class Raising(torch.autograd.Function):
    """The identity, whose way back raises where `ranks` has this one."""

    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return x * 1

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        if dist.get_rank() in ctx.ranks:
            raise ValueError("on the way back")
        return grad, None


def steps(faults, block):
    """Results and errors of steps; `faults` has by step where in it which ranks raise."""
    comm = connect(Mesh(x=4), timeout=20)
    rows = comm.mesh.layout("x")
    told = []
    for step in range(STEPS):
        where, ranks = faults.get(step, ("", ()))

        def fault(at, where=where, ranks=ranks):
            if at == where and comm.rank in ranks:
                raise ValueError(f"on purpose {at}")

        try:
            with fail_together(comm) if block else nullcontext():
                fault("before")
                x = distribute(torch.full((8,), 1.0 + step), rows, comm).requires_grad_()
                fault("between")
                if where == "backward":
                    f = partial(raising_back, ranks)
                    shard_map(f, comm.mesh, rows, rows)(x).sum().backward()
                total = x.sum().item()
                fault("after")
            told.append(total)
        except (ValueError, CommError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def raising_back(ranks, block):
    return Raising.apply(block, ranks)


FAULTS = st.dictionaries(
    st.integers(0, STEPS - 1),
    st.tuples(
        st.sampled_from(["before", "between", "backward", "after"]),
        st.sets(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
    ),
    max_size=3,
)


@given(faults=FAULTS)
@settings(max_examples=5, deadline=None)
def test_all_ranks_fail_in_a_block_together_and_go_on_together(pool4, faults):
    for rank, told in enumerate(pool4.run(steps, faults, True)):
        for step, outcome in enumerate(told):
            if step not in faults:
                assert outcome == 8 * (1 + step)
            elif rank in faults[step][1]:
                assert outcome.startswith("ValueError: on ")
            else:
                assert outcome.startswith("CommError: rank")
                assert "raised ValueError" in outcome
                assert " at test_fail_together.py:" in outcome


def test_an_error_in_a_backward_is_told_at_once_without_a_block(pool4):
    faults = {1: ("backward", (2,))}
    for rank, told in enumerate(pool4.run(steps, faults, False)):
        assert told[1].startswith("ValueError" if rank == 2 else "CommError: rank 2 raised")
        assert told[2:] == [24, 32, 40]


def alone():
    """What other ranks hear of rank 3, which makes no call after an error of all ranks."""
    comm = connect(Mesh(x=4), timeout=1)
    store = dist.distributed_c10d._get_default_store()
    with suppress(ValueError), fail_together(comm):
        raise ValueError
    if comm.rank == 3:
        store.wait(["told/0", "told/1", "told/2"])
    with pytest.raises(CommError) as told:
        distribute(torch.ones(4), comm.mesh.layout("x"), comm).full()
    store.set(f"told/{comm.rank}", "")
    return str(told.value)


def test_a_rank_that_lives_and_makes_no_call_is_said_to_live(pool4):
    texts = pool4.run(alone)
    assert len(set(texts)) == 1
    assert "rank 3: has made no call since its last error, test_fail_together.py:" in texts[0]
    assert "fail_together(comm)" in texts[0]


def late():
    """What both ranks hear where one has not come to the first call, and then on a thread."""
    comm = connect(Mesh(x=2), timeout=2)
    store = dist.distributed_c10d._get_default_store()
    if comm.rank:
        store.wait(["told/0"])
    with pytest.raises(CommError) as told:
        distribute(torch.ones(4), comm.mesh.layout("x"), comm).full()
    store.set(f"told/{comm.rank}", "")
    return str(told.value)


def on_a_thread():
    """What a thread gets from a Comm that another thread has connected."""
    comm = connect(Mesh(x=2), timeout=3)
    sums = []

    def run():
        sums.append(distribute(torch.ones(4), comm.mesh.layout("x"), comm).full().sum().item())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return sums


def test_a_rank_that_is_late_for_the_first_call_is_said_to_live():
    with local_cluster(2) as pool:
        assert pool.run(on_a_thread) == [[4], [4]]
    with local_cluster(2) as pool:
        texts = pool.run(late, timeout=60)
    assert texts[0] == texts[1]
    assert texts[0].startswith("rank 1 did not come to what others waited for within 2 s.")
    assert "rank 1: has made no call yet, test_fail_together.py:" in texts[0]


def test_on_a_simulated_mesh_it_changes_nothing():
    comm = connect(Mesh(x=2))

    @fail_together(comm)
    def function(x):
        return x / 0

    with pytest.raises(ZeroDivisionError):
        function(1)
    with pytest.raises(CommError, match="not a Comm"), fail_together(comm.mesh):  # type: ignore[arg-type]
        pass
