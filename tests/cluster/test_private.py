"""Tests of cluster: other users of this machine neither read nor write what its ranks meet by."""

import gc
import os
import stat
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fdtensor as fd


def listening(pid: int) -> list[str]:
    """The addresses, in hexadecimal, at which a process accepts connections."""
    sockets = set()
    for fd_ in os.listdir(f"/proc/{pid}/fd"):
        try:
            sockets.add(os.readlink(f"/proc/{pid}/fd/{fd_}"))
        except FileNotFoundError:
            continue  # the one that lists them
    found = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1].partition(":")[0])
    return found


def is_loopback(address: str) -> bool:
    return address.endswith("7F") if len(address) == 8 else address == "0" * 24 + "01000000"


def on_a_rank() -> list[str]:
    """Where a rank listens that has talked in all groups of two ranks that it is in."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for other in range(n):
        if other != rank:
            ranks = tuple(sorted((rank, other)))
            comm = fd.connect(fd.Mesh.from_ranks(list(ranks), "x"))
            x = fd.distribute(torch.arange(4), comm.mesh.layout("x"), comm)
            assert x.full().sum() == 6
    return listening(os.getpid())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")
def test_ranks_listen_on_the_loopback_alone_and_their_caller_nowhere(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    before = listening(os.getpid())
    with fd.LocalCluster(3, timeout=60) as cluster:
        addresses = cluster.run(on_a_rank)
        assert all(addresses), "no rank listens: this test sees nothing"
        assert all(is_loopback(a) for of_rank in addresses for a in of_rank)
        assert listening(os.getpid()) == before


def test_only_its_owner_can_enter_where_ranks_meet_and_it_is_gone_with_them(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with fd.LocalCluster(2, timeout=60) as cluster:
        cluster.run(dist.get_rank)
        (place,) = tmp_path.iterdir()
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in place.iterdir()}
        assert modes == {"store": 0o600}
    assert not [*tmp_path.iterdir()]


def test_a_child_that_drops_the_cluster_leaves_the_place_where_ranks_meet(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cluster = fd.LocalCluster(2, timeout=60)
    cluster.run(dist.get_rank)
    child = os.fork()
    if not child:
        del cluster
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert [*tmp_path.iterdir()]
    assert cluster.run(dist.get_rank) == [0, 1]
    del cluster
    gc.collect()
    assert not [*tmp_path.iterdir()]
