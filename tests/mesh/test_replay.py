"""Records of calls of real ranks, and what `replay` tells of them."""

import json
import re

import pytest
import torch

import fdtensor as fd
from fdtensor import CommError, Mesh, connect, distribute, spmd
from fdtensor.inspect.replay import replayed
from fdtensor.testing.pool import GlooPool

pytestmark = pytest.mark.mesh

ROWS = Mesh(x=2).layout("x")


def part_and_go_on(folder: str) -> str:
    """The error of ranks that differ in a plan; after it they go on together."""
    comm = connect(Mesh(x=2), timeout=20)
    x, y = (distribute(torch.arange(n), ROWS, comm) for n in (6, 7))
    spmd(lambda w: w.sum())(x)  # which nobody keeps
    twice = spmd(lambda w: w.sum() * 2)
    twice(x)
    with pytest.raises(CommError) as caught:  # noqa: PT012 - in which of them it is raised is free
        x.redistribute(ROWS.mesh.layout()) if comm.rank else y.full()
        (x + x).full()
    x.full()
    fd.io.dump_calls(comm, folder)
    return caught.value.sentence


def test_records_have_the_calls_before_an_error_and_after(tmp_path, monkeypatch):
    at_error, after = tmp_path / "error", tmp_path / "after"
    monkeypatch.setenv("FDTENSOR_CALLS", str(at_error))
    with GlooPool(2) as pool:
        first, second = pool.run(part_and_go_on, str(after))
    assert first == second
    (number,) = re.findall(r"do not agree on call (\d+)", first)
    for folder in (at_error, after):
        text = str(replayed(folder))
        assert f"they part at call {number}" in text
        assert f"> call {number:<5} rank 1: `this plan`" in text
        assert "all run" in text
    assert "since the last error" not in str(replayed(at_error))
    assert "calls since the last error: they agree\n" in text
    before, since = json.loads((after / "rank0.json").read_text())["sets"]
    assert (before["errors"], since["errors"]) == (0, 1)
    programs = [call for call in before["calls"] if call["what"].startswith("<lambda>")]
    assert [call["bytes"] for call in programs] == [8, 8]
    assert ["ran" in call for call in programs] == [False, True]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "it is no JSON"),
        ("[]", "it is a list, not an object"),
        ('{"rank": 0, "sets": [{}], "ran": {}}', "a set lacks 'ranks'"),
        ('{"rank": 0, "sets": [], "ran": {"a": "x"}}', "is 'x', not an object"),
        ('{"rank": 0, "sets": [], "ran": []}', "'ran' is not an object"),
    ],
)
def test_a_file_that_is_no_record_is_named(tmp_path, text, what):
    (tmp_path / "rank0.json").write_text(text)
    with pytest.raises(CommError, match=f"rank0.json is no record of calls: .*{what}"):
        replayed(tmp_path)


def test_calls_that_one_rank_lacks_are_told(tmp_path):
    call = {"mark": 5, "what": "full()", "line": "", "began": 1.0, "ended": 2.0}
    for rank, last in enumerate((3, 2)):
        calls = [{**call, "number": n} for n in range(1, last + 1)]
        own = {"ranks": [0, 1], "errors": 0, "failed": False, "calls": calls}
        record = {"rank": rank, "sets": [own], "ran": {}}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(record))
    lines = [" ".join(line.split()) for line in str(replayed(tmp_path)).splitlines()]
    assert "ranks 0-1, 3 calls: they agree up to call 2" in lines
    assert [line.split()[1] for line in lines if line.startswith("call")] == ["2", "3", "3"]
    assert "call 3 rank 1: not there: the last is call 2" in lines
