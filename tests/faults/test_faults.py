"""Faults of one rank: all living ranks have one error, in time, and can go on after it.

The whole table is `python -m tests.faults`; these are the cells that differ in how they are told.
"""

import pytest

from tests.faults.cell import Cell, run_cell
from tests.faults.partition import possible

pytestmark = pytest.mark.mesh

TIMEOUT = 3.0
"""Seconds that ranks wait for each other."""

LATE = 20.0
"""Seconds more: less than the 30 after which gloo itself gives up, however busy the machine is.

`python -m tests.faults` shows that 2 are enough on a machine that does nothing else.
"""


def ended(phase: str, fault: str) -> Cell:
    """A cell that did not hang, with the same error on all living ranks."""
    cell = run_cell(phase, fault, TIMEOUT)
    assert not cell.hangs
    assert not cell.silent
    assert cell.seconds < TIMEOUT + LATE
    assert len(cell.errors) == 1, cell.errors
    return cell


def sentence(cell: Cell) -> str:
    return cell.errors[0].partition("\n")[0]


@pytest.mark.parametrize(
    ("phase", "fault", "text"),
    [
        ("connect", "kill", "rank 2 did not come to connect within 3 s."),
        ("backward", "kill", "rank 2 does not answer: the process has ended, is stopped, or "),
        ("full", "stop", "rank 2 does not answer: the process has ended, is stopped, or "),
        ("shard_map", "exit", "rank 2 has ended while others waited."),
    ],
)
def test_a_rank_that_is_gone_is_named(phase, fault, text):
    cell = ended(phase, fault)
    assert sentence(cell).startswith(text)
    assert phase == "connect" or cell.usable == ("yes",)


@pytest.mark.parametrize("phase", ["first_call", "save"])
def test_an_error_of_one_rank_is_that_of_all(phase):
    cell = ended(phase, "raise")
    assert sentence(cell).startswith("rank 2 raised Boom: 'lost' at rank.py:")
    assert cell.usable == ("yes",)


@pytest.mark.parametrize(
    ("phase", "fault"),
    [("cached_call", "swap"), ("redistribute_back", "skip"), ("random", "differ")],
)
def test_ranks_that_part_are_told_where(phase, fault):
    """Each with what it was at and the user's line; nobody gets a number."""
    cell = ended(phase, fault)
    assert sentence(cell).startswith("the ranks do not agree on")
    assert "rank 2 " in cell.errors[0]
    assert "phases.py:" in cell.errors[0]
    assert cell.usable == ("yes",)


@pytest.mark.skipif(not possible(), reason="needs network namespaces")
def test_hosts_that_cannot_reach_each_other_are_told_on_both():
    cell = run_cell("full", "partition", TIMEOUT)
    assert not cell.hangs
    assert not cell.silent
    assert cell.seconds < TIMEOUT + LATE
    assert {error.partition(" does not ")[0].partition(" do not ")[0] for error in cell.errors} == {
        "ranks 2-3",
        "the store through which ranks find each other",
    }
    assert set(cell.usable) == {"yes", "apart"}


def test_a_slow_rank_is_waited_for():
    cell = run_cell("redistribute", "slow", TIMEOUT)
    assert not cell.hangs
    assert cell.errors == ()
    assert cell.usable == ("yes",)
