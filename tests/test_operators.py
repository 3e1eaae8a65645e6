"""A sample of the measure of all ops, another one for every `FDTENSOR_SEED`; the table of them.

The whole of it is `python -m tests.operators`.
"""

import os
import random

import pytest

from tests.operators.samples import entries
from tests.operators.sweep import Extent, check_op
from tests.operators.table import TABLE, header, row

SEED = int(os.environ.get("FDTENSOR_SEED", "0"))
SOME = sorted(random.Random(SEED).sample(sorted(entries()), 150))
ROWS = sorted(random.Random(SEED + 1).sample(sorted(entries()), 40))
EXTENT = Extent(samples=2, line=6, square=3, seed=SEED)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_an_op_is_right_on_every_layout(name):
    found = check_op(name, EXTENT)

    wrong = [f"{text}: {r}" for text, r in found if r.kind not in ("right", "random", "none")]
    assert not wrong, "\n".join(wrong[:3])


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_the_table_says_what_an_op_moves(name):
    assert row(name) in TABLE.read_text().splitlines(), "run python -m tests.operators.table"


def test_the_table_has_all_ops_and_their_totals():
    lines = TABLE.read_text().splitlines()
    start = lines.index("| --- | --- | --- | --- | --- | --- | --- |") + 1

    assert lines[:start] == header(lines[start:])
    assert [line.split(" | ")[0].strip("| ") for line in lines[start:]] == list(entries())


def test_the_measure_sees_what_is_wrong(monkeypatch):
    """A rule that leaves out what other ranks hold is told of."""
    import torch

    from fdtensor.notation import core

    op = torch.ops.aten.cumsum.default
    wrong = core.Rule(
        lambda x, dim, **_: [((core.S(dim % x.ndim),), core.S(dim % x.ndim))],
        {},
        None,
        False,
        False,
    )
    monkeypatch.setitem(core._RULES, op, wrong)
    kinds = {r.kind for _, r in check_op("cumsum", Extent(samples=1, line=12, square=0))}
    assert "wrong" in kinds
