"""Tests of cluster: ranks are forks of a server that has torch, and are as new interpreters are."""

import os
import random
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import fdtensor as fd
from fdtensor.cluster import fork_server, processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")


@contextmanager
def ranks(n: int = 2, **options):
    with fd.LocalCluster(n, timeout=60, **options) as cluster:
        yield cluster


def parents(cluster: fd.LocalCluster) -> list[int]:
    return cluster.run(os.getppid)


def test_a_second_cluster_is_forked_from_the_servers_of_the_first():
    with ranks() as first, ranks(4) as second:
        assert len(set(parents(first))) == 2
        assert parents(second) == parents(first) * 2


def test_neighbours_hash_strings_each_in_its_own_way():
    with ranks() as cluster:
        hashes = cluster.run(lambda: hash("a name"))
    assert hashes[0] != hashes[1]


def test_ranks_draw_numbers_of_their_own_where_nobody_sets_a_seed():
    with ranks(4) as cluster:
        drawn = cluster.run(lambda: (random.random(), np.random.rand(), torch.rand(1).item()))
    assert [len(set(of_a_kind)) for of_a_kind in zip(*drawn, strict=True)] == [4, 4, 4]


def test_a_rank_begins_where_and_as_its_caller_is_at_its_start(monkeypatch, tmp_path):
    with ranks() as cluster:
        servers = parents(cluster)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "more")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none")
    with ranks(env={"GLOO_SOCKET_IFNAME": "lo"}) as cluster:
        assert parents(cluster) == servers
        assert cluster.run(os.getcwd) == [str(tmp_path)] * 2
        assert cluster.run(lambda: sys.path[0]) == [str(tmp_path / "more")] * 2
        assert cluster.run(lambda: os.environ["GLOO_SOCKET_IFNAME"]) == ["lo"] * 2
        sessions = cluster.run(lambda: os.getsid(0) == os.getpid())
        assert sessions == [True, True]


def test_another_environment_has_servers_of_its_own_and_the_old_end_with_their_ranks():
    with ranks(env={"A_VARIABLE": "0"}) as old:  # other tests have ranks of the common servers
        servers = parents(old)
        with ranks(env={"A_VARIABLE": "1"}) as new:
            assert not set(parents(new)) & set(servers)
            assert new.run(lambda: os.environ["A_VARIABLE"]) == ["1", "1"]
        assert parents(old) == servers
        known = {server.process.pid: server.process for server in fork_server._retired}
        retired = [known[pid] for pid in servers]
        assert [process.poll() for process in retired] == [None, None]
    assert [process.wait(10) for process in retired] == [0, 0]


def test_how_a_rank_ended_is_told():
    with ranks(env={"A_VARIABLE": "1"}) as cluster:
        with pytest.raises(fd.WorkerError, match="exited with 3"):
            cluster.run(lambda: cluster.rank or os._exit(3))
        with pytest.raises(fd.WorkerError, match="died of SIGTERM"):
            cluster.run(lambda: cluster.rank or os.kill(os.getpid(), signal.SIGTERM))


def runs(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_servers_that_were_killed_are_started_anew():
    with ranks(env={"A_VARIABLE": "1"}) as cluster:
        servers = parents(cluster)
        for server in servers:
            os.kill(server, signal.SIGKILL)
        assert cluster.run(lambda: 1) == [1, 1], "ranks need no server once they run"
        assert repr(cluster) == "<local cluster of 2 ranks: up>"
        pids = cluster.run(os.getpid)
    limit = time.monotonic() + 10
    while any(map(runs, pids)):
        assert time.monotonic() < limit
        time.sleep(0.01)
    with ranks(env={"A_VARIABLE": "1"}) as cluster:
        cluster.run(lambda: 1)  # interpreters of their own, if the servers' end was not known
    with ranks(env={"A_VARIABLE": "1"}) as cluster:
        assert not set(parents(cluster)) & set(servers)


def test_where_no_server_comes_up_ranks_are_new_interpreters_that_say_why(monkeypatch, capfd):
    started = []
    start = fork_server._started
    monkeypatch.setattr(fork_server, "_started", lambda env: started.append(env) or start(env))
    said = pytest.raises(fd.WorkerError, match="did not start: ranks 0-3 exited with 1")
    with ranks(4, env={"PYTHONHOME": "/nowhere"}) as cluster, said:
        cluster.run(os.getpid)
    assert len(started) == 2, "no more servers than one start takes"


def test_where_a_fork_is_not_safe_ranks_are_new_interpreters(monkeypatch):
    monkeypatch.setattr(processes, "_FORKS", False)
    with ranks() as cluster:
        assert parents(cluster) == [os.getpid()] * 2
        with pytest.raises(fd.WorkerError, match="exited with 3"):
            cluster.run(lambda: cluster.rank or os._exit(3))
