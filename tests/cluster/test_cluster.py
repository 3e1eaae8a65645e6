"""Tests of cluster: real ranks for a notebook, a script or a test."""

import contextlib
import importlib
import linecache
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import fdtensor as fd
from fdtensor import CommError, LayoutError, Mesh, SimulatedComm, WorkerError
from fdtensor.cluster.output import Lines
from fdtensor.layouts.text import spans

LOST = "\n\nThe ranks are stopped. What they kept is lost; the next run starts new ones."

MESH = Mesh(dp=2, tp=2)


@pytest.fixture(scope="module")
def cluster():
    with fd.LocalCluster(4, timeout=60, grace=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def small():
    """Ranks that tests may lose."""
    with fd.LocalCluster(2, timeout=60, grace=1) as cluster:
        yield cluster


class Local:
    """A class of this module, which the ranks cannot import."""

    def __init__(self, rank):
        self.rank = rank


def rank():
    return dist.get_rank()


def fail_on(ranks):
    if rank() in ranks:
        raise LayoutError("no such layout.", layout="R", hint="Try again.")
    total = torch.ones(1)
    dist.all_reduce(total)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def comes(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def gone(pids):
    pids = list(pids)
    return comes(lambda: not any(map(alive, pids)))


# What the ranks print.


def shown(lines, now=0.0):
    return [f"[{spans(ranks)}] {text}" for ranks, _, text in lines.ready(now)]


@st.composite
def printed(draw):
    """What each of three ranks prints, and the order in which it arrives."""
    said = draw(st.lists(st.lists(st.sampled_from("abcd"), max_size=5), min_size=3, max_size=3))
    order = [rank for rank, texts in enumerate(said) for _ in texts]
    return said, draw(st.permutations(order))


def arrived(said, order):
    lines, rest = Lines(len(said)), [iter(texts) for texts in said]
    for rank in order:
        lines.take(rank, "stdout", f"{next(rest[rank])}\n".encode(), 0.0)
    return lines


@given(printed())
def test_every_line_of_every_rank_is_shown_once_in_its_order(example):
    said, order = example
    lines, found = arrived(said, order), [[] for _ in said]
    for rank in range(len(said)):
        lines.close(rank, 0.0)
        for ranks, _, text in lines.ready(0.0):
            for each in ranks:
                found[each].append(text)
    assert found == said
    assert lines.due() is None


@given(printed())
def test_what_a_short_call_shows_does_not_depend_on_when_its_lines_arrived(example):
    said, order = example
    both = arrived(said, order), arrived(said, sorted(order))
    for lines in both:
        for rank in range(len(said)):
            lines.close(rank, 0.0)
    assert shown(both[0]) == shown(both[1])


def test_equal_lines_are_merged_around_those_of_single_ranks():
    lines = arrived([["a", "loss 1"], ["loss 1", "b", "c"], ["loss 1"]], [0, 0, 1, 1, 1, 2])
    assert shown(lines) == []
    for rank in range(3):
        lines.close(rank, 0.0)
    assert shown(lines) == ["[0] a", "[0-2] loss 1", "[1] b", "[1] c"]


def test_lines_of_the_same_ranks_stay_together():
    lines = arrived([["a", "b"], ["c", "d"], ["a", "b"]], [0, 1, 2, 2, 1, 0])
    for rank in range(3):
        lines.close(rank, 0.0)
    assert shown(lines) == ["[0,2] a", "[0,2] b", "[1] c", "[1] d"]


def test_a_line_of_all_ranks_is_shown_at_once_and_others_after_a_while():
    lines = Lines(2, patience=1.0)
    lines.take(0, "stdout", b"loss 1\nonly here\n", 5.0)
    assert shown(lines, 5.0) == []
    lines.take(1, "stdout", b"loss", 5.5)
    assert shown(lines, 5.5) == []
    lines.take(1, "stdout", b" 1\n", 5.6)
    assert shown(lines, 5.6) == ["[0-1] loss 1"]
    assert lines.due() == 6.0
    assert shown(lines, 5.9) == []
    assert shown(lines, 6.0) == ["[0] only here"]


def test_a_busy_rank_does_not_keep_the_lines_of_another_back():
    lines = Lines(2, patience=1.0)
    lines.take(1, "stdout", b"b\n", 0.0)
    found = []
    for tick in range(10):
        lines.take(0, "stdout", b"%d\n" % tick, tick / 2)
        found += shown(lines, tick / 2)
    assert found[:3] == ["[0] 0", "[0] 1", "[1] b"]


def test_lines_about_as_old_are_shown_in_the_order_of_ranks():
    lines = Lines(4, patience=1.0)
    for rank, since in ((2, 0.0), (0, 0.1), (1, 0.5), (3, 0.6)):
        lines.take(rank, "stdout", b"%d\n" % rank, since)
    assert shown(lines, 0.9) == []
    assert shown(lines, 1.0) == ["[0] 0", "[1] 1", "[2] 2"]
    assert shown(lines, 1.6) == ["[3] 3"]


def test_of_a_progress_bar_the_last_state_is_shown():
    lines = Lines(1)
    lines.take(0, "stderr", b"\r 1%\r 50%\r100%\r\nend", 0.0)
    lines.close(0, 0.0)
    assert shown(lines) == ["[0] 100%", "[0] end"]


def test_ranks_are_named_by_spans():
    assert [spans([3, 0, 1]), spans([2]), spans(range(5)), spans([])] == ["0-1,3", "2", "0-4", ""]


# Mistakes that need no ranks.


def test_a_cluster_has_ranks():
    for n in (0, 2.0):
        with pytest.raises(CommError) as raised:
            fd.local_cluster(n)
        assert str(raised.value) == (
            f"a cluster has 1 rank or more, not {n}.\n\nPass their number."
        )


def test_ranks_call_functions():
    with pytest.raises(CommError) as raised:
        fd.local_cluster(2).run(torch.ones(1))
    assert str(raised.value) == (
        "the ranks call a function, not a Tensor.\n\n"
        "Write cluster.run(fn, *args): each rank calls fn(*args)."
    )


def test_map_wants_one_value_a_rank():
    with pytest.raises(CommError) as raised:
        fd.local_cluster(2).map(print, [1, 2, 3])
    assert str(raised.value) == (
        "cluster.map was given 3 values for 2 ranks.\n\n"
        "Pass one value a rank, or cluster.run(fn, value) to give all the same."
    )


def test_the_caller_is_no_rank():
    cluster = fd.local_cluster(2)
    for name, use in {
        "comm(mesh)": lambda: cluster.comm(MESH),
        "rank": lambda: cluster.rank,
        "state": lambda: cluster.state,
    }.items():
        with pytest.raises(CommError) as raised:
            use()
        text = str(raised.value).removesuffix(
            " Here, SimulatedComm(mesh) has all ranks in this process."
        )
        assert text == (
            "this process is not a rank of the cluster.\n\n"
            f"Use cluster.{name} inside of a function that cluster.run(fn) runs."
        )


def test_a_call_that_cannot_be_pickled_is_refused_before_ranks_start():
    cluster = fd.local_cluster(2)
    with pytest.raises(CommError, match="cannot travel: cannot pickle"):
        cluster.run(lambda x: x, (i for i in range(3)))
    assert repr(cluster) == "<local cluster of 2 ranks: not started>"


def test_a_worker_error_can_be_pickled():
    error = WorkerError("rank 1 raised E", {1: "E\ntold"}, {1: ValueError("told")}, lost=True)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "rank 1 raised E\n\nOn rank 1:\nE\ntold" + LOST
    assert repr(again.errors) == repr(error.errors)


# Calls and results.


@pytest.mark.mesh
def test_results_come_in_rank_order(cluster):
    assert cluster.run(rank) == [0, 1, 2, 3]
    assert cluster.run(lambda a, b: a + b + cluster.rank, 10, 20) == [30, 31, 32, 33]
    assert cluster.map(lambda a, b: (a, b, cluster.rank), "abcd", range(4)) == [
        ("a", 0, 0),
        ("b", 1, 1),
        ("c", 2, 2),
        ("d", 3, 3),
    ]
    assert cluster.map(lambda: cluster.n) == [4, 4, 4, 4]
    assert repr(cluster) == "<local cluster of 4 ranks: up>"
    assert cluster.run(lambda: repr(cluster))[2] == "<rank 2 of a local cluster of 4>"


@pytest.mark.mesh
def test_the_ranks_stay_up_and_keep_their_state(cluster):
    def keep(value):
        cluster.state.kept = value + cluster.rank

    before = cluster.run(os.getpid)
    cluster.run(keep, 10)
    assert cluster.run(lambda: cluster.state.kept) == [10, 11, 12, 13]
    assert cluster.run(lambda: cluster.comm(MESH)) == cluster.run(lambda: cluster.comm(MESH))
    assert cluster.run(lambda: cluster.comm(MESH) is cluster.comm(MESH)) == [True] * 4
    assert cluster.run(os.getpid) == before
    with pytest.raises(WorkerError) as raised:
        cluster.run(lambda: cluster.state.other)
    assert raised.value.sentence == (
        "ranks 0-3 raised AttributeError: this rank keeps no 'other': "
        "set cluster.state.other in an earlier call; new ranks start with nothing."
    )


@pytest.mark.mesh
def test_ranks_do_not_run_the_cluster(cluster):
    with pytest.raises(WorkerError) as raised:
        cluster.run(lambda: cluster.run(rank))
    assert raised.value.sentence == (
        "ranks 0-3 raised AttributeError: cluster.run is not for functions that run on a rank; "
        "they have cluster.comm(mesh), cluster.rank, cluster.n and cluster.state."
    )


@pytest.mark.mesh
def test_classes_of_a_test_module_go_there_and_back(cluster):
    back = cluster.run(lambda one: (type(one) is Local, Local(rank())), Local(3))
    assert [(same, type(local) is Local, local.rank) for same, local in back] == [
        (True, True, each) for each in range(4)
    ]


def one_of_each_op():
    aten = torch.ops.aten
    return [torch.ops, aten, aten.add, aten.add.Tensor, torch.ops.higher_order.cond]


@pytest.mark.mesh
def test_ops_of_torch_go_there_and_back(cluster):
    for found in cluster.run(one_of_each_op):
        assert all(a is b for a, b in zip(found, one_of_each_op(), strict=True))


@pytest.mark.mesh
def test_a_module_that_is_not_installed_is_sent_as_it_is_now(cluster, tmp_path, monkeypatch):
    file = tmp_path / "of_the_user.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file.write_text("def f():\n    return 1\n")
    module = importlib.import_module("of_the_user")
    assert cluster.run(module.f) == [1] * 4
    file.write_text("def f():\n    return 1 + 1\n")
    assert cluster.run(importlib.reload(module).f) == [2] * 4


@pytest.mark.mesh
def test_a_simulated_dtensor_is_real_on_the_ranks_and_comes_back_simulated(cluster):
    comm = SimulatedComm(MESH)
    full = torch.arange(30.0).reshape(6, 5)
    x = fd.distribute(full, MESH.layout("dp", "tp"), comm)
    lone = fd.distribute(full, Mesh.from_ranks([3, 1], "line").layout("line"), comm)

    def move(tree, comm):
        x, lone = tree["x"], tree["again"][0]
        assert isinstance(x.comm, fd.FuncolComm)
        assert x.comm is comm is cluster.comm(MESH) is lone.comm
        assert tree["again"][1] is x
        return [x.redistribute(MESH.layout(("tp", "dp"))), lone, tuple(x.local.shape), comm]

    results = cluster.run(move, {"x": x, "again": [lone, x]}, comm)
    for moved, left, shape, its in results:
        assert moved is results[0][0]
        assert moved.comm is left.comm is its is comm
        assert str(moved.type) == "f32[6@(tp,dp),5]"
        assert torch.equal(moved.full(), full)
        assert torch.equal(left.full(), full)
        assert shape in {(3, 3), (3, 2)}
    assert len(lone.local) == 2


@pytest.mark.mesh
def test_parameters_stay_parameters_on_the_way(cluster):
    x = fd.distribute(torch.ones(4, requires_grad=True), MESH.layout("tp"), SimulatedComm(MESH))

    def loss(x):
        x.full().square().sum().backward()
        return fd.DTensor(x.local.grad, x.type, x.comm), x.local.is_leaf

    for found, leaf in cluster.run(loss, x):
        assert leaf
        assert torch.equal(found.full(), torch.full((4,), 2.0))


@pytest.mark.mesh
def test_a_dtensor_that_some_ranks_keep_is_named(cluster):
    def first(comm):
        x = fd.distribute(torch.ones(4), MESH.layout("dp"), comm)
        return x if cluster.rank < 2 else None

    before = cluster.run(os.getpid)
    with pytest.raises(CommError) as raised:
        cluster.run(first, SimulatedComm(MESH))
    assert str(raised.value) == textwrap.dedent(
        """\
        rank 0 returned f32[4@dp], but ranks 2-3 did not.

          mesh: Mesh(dp=2, tp=2)

        A DTensor comes back when all ranks of its mesh return it. \
Return it on all of them, or return x.full() or x.local."""
    )
    assert cluster.run(os.getpid) == before


@pytest.mark.mesh
def test_a_mesh_has_at_most_the_ranks_of_the_cluster(cluster):
    with pytest.raises(WorkerError) as raised:
        cluster.run(lambda: cluster.comm(Mesh(x=5)))
    assert raised.value.sentence == (
        "ranks 0-3 raised CommError: the mesh has rank 4, but there are 4 processes."
    )
    assert isinstance(raised.value.errors[0], CommError)


# Output.


@pytest.mark.mesh
def test_output_is_labelled_where_run_was_called(cluster, capsys):
    def talk():
        print("hello from", cluster.rank)
        if cluster.rank == 2:
            print("a warning", file=sys.stderr)
            subprocess.run(["echo", "of a child"])
        print("of all", end="")

    cluster.run(talk)
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "[0] hello from 0",
        "[1] hello from 1",
        "[2] hello from 2",
        "[2] of a child",
        "[3] hello from 3",
        "[0-3] of all",
    ]
    assert said.err == "[2] a warning\n"


# Errors.


@pytest.mark.mesh
def test_an_error_on_all_ranks_is_told_once_and_the_ranks_stay_up(cluster):
    before = cluster.run(os.getpid)
    with pytest.raises(WorkerError) as raised:
        cluster.run(fail_on, range(4))
    text = str(raised.value)
    line = fail_on.__code__.co_firstlineno + 2
    assert text == textwrap.dedent(
        f"""\
        ranks 0-3 raised LayoutError: no such layout.

        On ranks 0-3:
        Traceback (most recent call last):
          File "{__file__}", line {line}, in fail_on
            raise LayoutError("no such layout.", layout="R", hint="Try again.")
        fdtensor.LayoutError: no such layout.

          layout: R

        Try again."""
    )
    assert sorted(raised.value.failures) == [0, 1, 2, 3]
    assert all(isinstance(error, LayoutError) for error in raised.value.errors.values())
    assert not raised.value.lost
    assert cluster.run(os.getpid) == before


@pytest.mark.mesh
def test_tracebacks_have_the_lines_of_a_cell(cluster):
    source = "def cell():\n    raise ValueError('told')  # of a cell\n"
    names = {}
    exec(compile(source, "<cell 1>", "exec"), names)
    linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(True), "<cell 1>")
    with pytest.raises(WorkerError, match=r"raise ValueError\('told'\)  # of a cell"):
        cluster.run(names["cell"])


@pytest.mark.mesh
def test_a_result_that_cannot_be_pickled_is_an_error_of_the_rank(cluster):
    with pytest.raises(WorkerError, match=r"^ranks 0-3 raised TypeError: cannot pickle"):
        cluster.run(lambda: (i for i in range(3)))


@pytest.mark.mesh
def test_an_error_on_one_rank_stops_the_others_and_tells_where_they_were(small):
    before = small.run(os.getpid)
    with pytest.raises(WorkerError) as raised:
        small.run(fail_on, {1})
    text = str(raised.value)
    first = "rank 1 raised LayoutError: no such layout.; rank 0 did not answer 1 s later"
    assert text.splitlines()[0] == first
    assert list(raised.value.failures) == [1, 0]
    line = fail_on.__code__.co_firstlineno + 4
    assert (
        "\n\nOn rank 0:\ndid not answer 1 s later; it was here (most recent call last):\n"
        f'  File "{__file__}", line {line}, in fail_on\n    dist.all_reduce(total)\n'
    ) in text
    assert text.endswith(LOST)
    assert raised.value.lost
    assert gone(before)
    assert repr(small) == "<local cluster of 2 ranks: not started>"


@pytest.mark.mesh
def test_ranks_that_die_are_named_and_new_ones_start(small, capfd):
    before = small.run(os.getpid)
    with pytest.raises(WorkerError) as raised:
        small.run(lambda: os.kill(os.getpid(), signal.SIGSEGV))
    assert str(raised.value) == "ranks 0-1 died of SIGSEGV" + LOST
    assert gone(before)
    assert "[0-1] Fatal Python error: Segmentation fault" in capfd.readouterr().err
    assert small.run(rank) == [0, 1]


@pytest.mark.mesh
def test_a_rank_that_died_between_calls_is_named(small):
    pid = small.run(os.getpid)[0]
    os.kill(pid, signal.SIGKILL)
    assert comes(lambda: repr(small) == "<local cluster of 2 ranks: a rank has ended>")
    with pytest.raises(WorkerError) as raised:
        small.run(lambda: os._exit(3))
    assert str(raised.value) == (
        "rank 0 died of SIGKILL (out of memory?); rank 1 exited with 3" + LOST
    )
    assert small.run(rank) == [0, 1]


@pytest.mark.mesh
def test_an_interrupt_stops_the_ranks_and_what_they_started(small, tmp_path, capsys):
    def busy():
        child = subprocess.Popen(["sleep", "60"])
        (tmp_path / f"{child.pid}").touch()
        time.sleep(60)

    def interrupt():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        time.sleep(1.0)  # they sleep by then
        os.kill(os.getpid(), signal.SIGINT)

    before = small.run(os.getpid)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        small.run(busy)
    line = busy.__code__.co_firstlineno + 3
    assert capsys.readouterr().err == textwrap.dedent(
        f"""\
        interrupted: the ranks are stopped, and what they kept is lost.
        On ranks 0-1, most recent call last:
          File "{__file__}", line {line}, in busy
            time.sleep(60)
        """
    )
    assert gone([*before, *(int(file.name) for file in tmp_path.iterdir())])
    assert small.run(rank) == [0, 1]


@pytest.mark.mesh
def test_a_cluster_that_cannot_start_says_why():
    with fd.local_cluster(1, env={"GLOO_SOCKET_IFNAME": "none"}) as cluster:
        with pytest.raises(WorkerError, match=r"^the ranks did not start: rank 0 raised "):
            cluster.run(rank)
        assert repr(cluster) == "<local cluster of 1 rank: not started>"


@pytest.mark.mesh
def test_threads_environment_and_timeout_are_given_to_the_cluster():
    def found():
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["OF_THE_USER"]

    env = {"OF_THE_USER": "a"}
    with fd.local_cluster(1, threads=2, env=env, timeout=0.3) as cluster:
        assert cluster.run(found, timeout=60) == [(2, "2", "a")]
        with pytest.raises(WorkerError, match=r"^rank 0 did not answer in 0.3 s\n"):
            cluster.run(time.sleep, 60)


@pytest.mark.mesh
@pytest.mark.parametrize("ending", ["pass", "held()"])
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
    pids, said = ran.stdout.splitlines()
    with contextlib.ExitStack() as stack:
        for pid in map(int, pids.split()):
            stack.callback(lambda pid=pid: alive(pid) and os.kill(pid, signal.SIGKILL))
        assert gone(map(int, pids.split()))
    assert said == "[0-1] hello"


SCRIPT = """
import os
import re
import threading
import time

import fdtensor as fd

cluster = fd.local_cluster(2)
print(*cluster.run(lambda: os.getpid()), flush=True)
cluster.run(lambda: print("hello"))

def held():
    threading.Timer(1, lambda: os.kill(os.getpid(), 9)).start()
    cluster.run(lambda: re.match("(a+)+$", "a" * 60 + "b"))  # never leaves the GIL

"""
