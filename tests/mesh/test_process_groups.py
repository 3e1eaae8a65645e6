"""Process groups: named by their ranks, made when needed, once, without waiting for others."""

import gc
import itertools
import os
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist

from fdtensor import (
    CommError,
    Layout,
    Mesh,
    Replicate,
    Shard,
    TensorType,
    connect,
    distribute,
    from_local,
    plan,
    run,
)
from fdtensor.runtime.control.process import group_of, groups
from fdtensor.runtime.funcol import FuncolComm
from fdtensor.runtime.process_groups import SECONDS, group_name
from fdtensor.testing.pool import GlooPool

pytestmark = pytest.mark.mesh


@pytest.fixture(scope="module")
def own4():
    """Four ranks that no other file uses.

    These tests use groups by name, without a Comm, which alone makes those anew that an error cut.
    """
    with GlooPool(4, timeout=180) as pool:
        yield pool


def reached(name: str, value: float) -> float:
    """The sum of `value` over the group of this name."""
    total = torch.ops._c10d_functional.all_reduce(torch.tensor(value), "sum", name)
    return torch.ops._c10d_functional.wait_tensor(total).item()


def test_a_name_follows_from_the_ranks():
    names = [group_name(some) for k in range(1, 6) for some in itertools.combinations(range(30), k)]
    assert len(set(names)) == len(names)
    assert group_name((3, 0, 1)) == group_name((0, 1, 3)) == "fdtensor_0_1_3"
    assert group_name((1, 23)) != group_name((12, 3)) != group_name((1, 2, 3))
    many = [group_name(range(n)) for n in range(20, 200)]
    assert len(set(many)) == len(many)
    assert max(map(len, many)) < 60


def named(mesh: Mesh, *axes: str) -> list[tuple[str, tuple[int, ...], float]]:
    """The groups of this rank, each with the sum of its ranks, found by name."""
    rank = float(dist.get_rank())
    before = {id(group) for group in dist.distributed_c10d._world.pg_map}
    made = groups(mesh, *axes)
    again = groups(mesh, *axes)
    after = {id(group) for group in dist.distributed_c10d._world.pg_map}
    assert made == again
    assert len(after - before) <= len(made)
    return [(name, ranks, reached(name, rank)) for name, ranks in made.items()]


def test_groups_are_those_of_each_axis_and_of_the_mesh(own4):
    mesh = Mesh.from_ranks([[3, 1], [0, 2]], ("a", "b"))
    entries = own4.run(named, mesh)
    due = {
        0: [(0, 3), (0, 2)],
        1: [(1, 2), (1, 3)],
        2: [(1, 2), (0, 2)],
        3: [(0, 3), (1, 3)],
    }
    for rank, some in enumerate(entries):
        all_due = [*due[rank], (0, 1, 2, 3)]
        assert some == [(group_name(ranks), ranks, sum(ranks)) for ranks in all_due]


def test_a_rank_outside_makes_no_groups(own4):
    entries = own4.run(named, Mesh.from_ranks([[2, 0, 1]], ("a", "b")), "a", "b")
    assert entries == [[("fdtensor_0_1_2", (0, 1, 2), 3.0)]] * 3 + [[]]


def crossing(orders: dict[int, list[tuple[int, ...]]]) -> list[float]:
    """The sums over groups that every rank makes in another order, and uses in the same one."""
    rank = dist.get_rank()
    names = [group_of(ranks) for ranks in orders[rank]]
    assert len(set(names)) == len(names)
    return [reached(group_of(ranks), rank) for ranks in sorted(orders[rank])]


def test_ranks_may_make_groups_in_different_orders():
    """Were making a group to wait for its members, each rank would wait for the next."""
    ring = {0: [(0, 1), (0, 3)], 1: [(1, 2), (0, 1)], 2: [(2, 3), (1, 2)], 3: [(0, 3), (2, 3)]}
    wide = {
        0: [(0, 1, 2), (0, 1, 3)],
        1: [(0, 1, 3), (0, 1, 2), (1, 2, 3)],
        2: [(1, 2, 3), (0, 1, 2)],
        3: [(0, 1, 3), (1, 2, 3)],
    }
    with GlooPool(4, timeout=30) as pool:  # groups that no other test has made
        for orders in (ring, wide):
            due = [[float(sum(ranks)) for ranks in sorted(orders[rank])] for rank in range(4)]
            assert pool.run(crossing, orders) == due


def beside() -> list[float]:
    """Groups of ours before, between and after those that the user makes."""
    rank, made = dist.get_rank(), []
    if rank in (1, 2):
        made.append(group_of((1, 2)))
    theirs = dist.new_group([0, 2])
    if rank != 3:
        made.append(group_of((0, 1, 2)))
    others, _ = dist.new_subgroups(2)
    made.append(group_of((0, 1, 2, 3)))
    found = [reached(name, rank) for name in made]
    for group in (theirs, others):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            total = torch.tensor(float(rank))
            dist.all_reduce(total, group=group)
            found.append(total.item())
    return found


def test_groups_live_beside_those_of_the_user(own4):
    assert own4.run(beside) == [
        [3.0, 6.0, 2.0, 1.0],
        [3.0, 3.0, 6.0, 1.0],
        [3.0, 3.0, 6.0, 2.0, 5.0],
        [6.0, 5.0],
    ]


def lazily() -> tuple[str | None, list[float]]:
    """What making a group leaves of the environment, and how long it waits: first, and later."""
    pair = (0, 1) if dist.get_rank() < 2 else (2, 3)
    seconds = []
    for timeout in (SECONDS, 7.5, SECONDS):
        connect(Mesh(x=4), timeout=timeout)
        group = torch._C._distributed_c10d._resolve_process_group(group_of(pair))
        options = group._get_backend(torch.device("cpu")).options
        seconds.append(options._timeout.total_seconds())
    return os.environ.get("TORCH_GLOO_LAZY_INIT"), seconds


def test_a_group_has_the_timeout_of_the_comm_that_was_connected_last(own4):
    assert own4.run(lazily) == [(None, [SECONDS, 7.5, SECONDS])] * 4


FAKE = """
import warnings

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

warnings.simplefilter("error")
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
from fdtensor import Mesh, connect, distribute

mesh = Mesh(x=4)
for timeout in (60, 5):
    comm = connect(mesh, timeout=timeout)
    print(distribute(torch.ones(8), mesh.layout("x"), comm).full().shape[0])
"""


def test_a_backend_without_a_timeout_is_left_alone():
    done = subprocess.run([sys.executable, "-c", FAKE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "8\n8\n"), done.stderr[-3000:]


SCRIPT = """
import warnings

import torch, torch.distributed as dist

warnings.simplefilter("error")
from fdtensor import Layout, Mesh, Replicate, Shard, connect, distribute
from fdtensor.runtime.control.process import groups

mesh, full = Mesh(x=2), torch.arange(12.0).view(4, 3)
assert not dist.is_initialized()


def walk(comm):
    assert type(comm).__name__ == "FuncolComm" and comm.mesh is mesh, comm
    x = distribute(full, Layout(mesh, [Shard(0)]), comm)
    for to in (Shard(1), Replicate(), Shard(0)):
        x = x.redistribute(Layout(mesh, [to]))
    assert torch.equal(x.full(), full)
    assert torch.equal(x.local, full[2 * dist.get_rank() :][:2])
    alone = Mesh.from_ranks([dist.get_rank()], "me")
    assert groups(alone) == {} and list(groups(mesh)) == ["fdtensor_0_1"]


comm = connect(mesh)
walk(comm)
rank = dist.get_rank()
dist.destroy_process_group()
print(f"rank {rank} is done\\n", end="")  # in one piece
"""


def test_under_torchrun_connect_brings_up_a_group(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(script)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n"))[-2:] == ["rank 0 is done", "rank 1 is done"]


def anew() -> list[float]:
    """The sums over a group and over all, before and after the default group is replaced."""
    rank, found = dist.get_rank(), []
    names = [group_of((0, 1, 2)), *([group_of((0, 2))] if rank != 1 else [])]
    found += [reached(name, rank) for name in names]
    store = dist.distributed_c10d._get_default_store()
    before, comm = weakref.ref(dist.group.WORLD), FuncolComm(Mesh(x=3))
    x = distribute(torch.arange(6.0), Layout(comm.mesh, [Shard(0)]), comm)
    assert torch.equal(x.full(), torch.arange(6.0))
    dist.destroy_process_group()
    gc.collect()
    assert before() is None, "a group that was destroyed is kept"
    with pytest.raises(CommError, match="the process group of this Comm has ended"):
        from_local(x.local, x.type, comm)
    dist.init_process_group("gloo", store=dist.PrefixStore("new", store), rank=rank, world_size=3)
    mesh = Mesh.from_ranks([2, 0], "x")
    src = TensorType((4,), torch.float32, Layout(mesh, [Shard(0)]))
    out = run(
        plan(src, Layout(mesh, [Replicate()])), torch.full((2,), float(rank)), FuncolComm(mesh)
    )
    names = [group_of((0, 1, 2)), *([group_of((0, 2))] if rank != 1 else [])]
    return [*found, *[reached(name, rank) for name in names], out.sum().item()]


def test_groups_end_with_the_default_group_and_begin_again():
    with GlooPool(3, timeout=30) as pool:
        some = [3.0, 2.0, 3.0, 2.0, 4.0]
        assert pool.run(anew) == [some, [3.0, 3.0, 2.0], some]


def undefined() -> str:
    """A plan on a default group whose backend nobody named."""
    dist.destroy_process_group()
    dist.init_process_group(init_method="env://", rank=0, world_size=1)
    comm = FuncolComm(Mesh(x=1))
    src = TensorType((4,), torch.float32, Layout(comm.mesh, [Shard(0)]))
    out = run(plan(src, Layout(comm.mesh, [Replicate()])), torch.ones(4), comm)
    return f"{comm.backend} {comm.cost.name} {out.sum().item()}"


def test_the_backend_of_a_group_is_found_where_nobody_named_it(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    with GlooPool(1) as pool:
        assert pool.run(undefined) == ["gloo nccl 4.0"]


def threads_after_errors(errors: int) -> list[int]:
    """The threads of this rank after each error that leaves something under way."""
    comm, typed = connect(Mesh(x=2)), TensorType((4,), torch.float32, Mesh(x=2).layout("x"))
    threads = []
    for _ in range(errors):
        x = from_local(torch.ones(2), typed, comm)
        x.full()  # agreed on, so that the next one begins at once
        with pytest.raises(CommError):
            x.full() if comm.rank == 0 else from_local(torch.ones(3), typed, comm)
        threads.append(len(os.listdir("/proc/self/task")))
    return threads


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_groups_of_before_an_error_are_freed():
    with GlooPool(2) as pool:
        for _, second, *later in pool.run(threads_after_errors, 5):
            assert later == [second] * 3
