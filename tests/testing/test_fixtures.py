"""Tests of testing/fixtures.py: real ranks for the tests of others."""

import subprocess
import sys
import textwrap

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.mesh

CONFTEST = 'pytest_plugins = ["fdtensor.testing.fixtures"]\n'

TESTS = """
import torch.distributed as dist

def test_ranks(gloo_ranks):
    ranks = gloo_ranks(2)
    assert ranks.run(dist.get_rank) == [0, 1]
    with open("pids", "w") as file:
        file.write(" ".join(str(worker.process.pid) for worker in ranks._workers))

def test_the_same_ranks(gloo_ranks):
    pids = [worker.process.pid for worker in gloo_ranks(2)._workers]
    assert open("pids").read().split() == [str(pid) for pid in pids]

def test_without_gloo(gloo_ranks, monkeypatch):
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    gloo_ranks(2)
"""


def test_tests_of_others_share_ranks_and_skip_where_there_is_no_gloo(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(textwrap.dedent(TESTS))
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert ": no real ranks here: torch is built without gloo." in done.stdout
    for pid in (tmp_path / "pids").read_text().split():
        gone = subprocess.run(["ps", "-p", pid, "-o", "stat="], capture_output=True, text=True)
        assert gone.stdout.strip() in ("", "Z")


def test_pools_of_these_tests_are_those_of_the_fixture(pool4, gloo_ranks):
    assert pool4 is gloo_ranks(4)
    assert gloo_ranks(1).run(dist.get_world_size) == [1]
