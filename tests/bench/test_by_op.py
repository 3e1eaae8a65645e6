"""What programs move that run op by op: never more than on DTensor."""

from collections.abc import Iterator

import pytest

from fdtensor.testing.pool import GlooPool
from tests.bench.by_op import PROGRAMS, Effort, Found, measure

pytestmark = pytest.mark.mesh


@pytest.fixture(scope="module")
def counted() -> Iterator[Found]:
    with GlooPool(1) as alone:
        yield measure(alone, Effort())


@pytest.mark.few(4)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_no_program_moves_more_than_on_dtensor(counted, program):
    ours, theirs = (row for row in counted.rows if row.program == program.name)
    assert (ours.side, theirs.side) == ("fdtensor", "DTensor")
    assert ours.forward_bytes <= theirs.forward_bytes
    assert ours.backward_bytes <= theirs.backward_bytes
    # a maximum travels in an exchange of two collectives, where gloo would lose a nan
    exchanged = max(ours.forward.count("all_to_all_single") - 1, 0)
    assert len(ours.forward) - exchanged <= len(theirs.forward)
    assert len(ours.backward) <= len(theirs.backward)
