"""Tests that a save that is killed anywhere leaves the old checkpoint or the new one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.depth import times
from tests.support.kills import SCENARIOS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What was there after kills at every call to the system, or at some of them."""
    folder = tmp_path_factory.mktemp("kills")
    command = [sys.executable, "-m", "tests.support.kills", str(folder), str(times(9, 1))]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    told = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(told.stdout)


def test_the_old_checkpoint_or_the_new_one_loads(outcomes):
    for name, before in (("first", "none"), ("over", "1"), ("behind", "1")):
        where = "step_2" if name == "first" else "step_1"
        seen = [outcome[where] for outcome in outcomes[name]]
        assert seen == sorted(seen, key=lambda number: number == "2")
        assert {*seen} == {before, "2"}


def test_older_checkpoints_go_after_the_new_one_is_there(outcomes):
    seen = [(o["step_1"], o["step_2"]) for o in outcomes["kept"]]
    assert seen == sorted(seen, key=[("1", "none"), ("1", "2"), ("none", "2")].index)
    assert seen[0] == ("1", "none")
    assert seen[-1] == ("none", "2")


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_latest_checkpoint_is_one_that_loads(outcomes, name):
    assert {o["latest"] for o in outcomes[name]} <= (
        {"2", "none"} if name == "first" else {"1", "2"}
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_next_save_removes_what_a_killed_one_left(outcomes, name):
    assert {(o["after"], o["files"]) for o in outcomes[name]} == {("2", "2")}
