"""A sample of the measure of all ops, another one for every `FDTENSOR_SEED`; the table of them.

The whole of it is `python -m tests.operators`.
"""

import os
import random

import attrs
import pytest
import torch

from fdtensor import Mesh, SimulatedComm, TensorType, distribute, spmd, trace
from tests.operators.axes import cuts_of
from tests.operators.samples import entries
from tests.operators.sweep import Extent, check_op
from tests.operators.table import TABLE, header, row
from tests.support.depth import times

SEED = int(os.environ.get("FDTENSOR_SEED", "0"))
SOME = sorted(random.Random(SEED).sample(sorted(entries()), 150))
ROWS = sorted(random.Random(SEED + 1).sample(sorted(entries()), 40))
PARTS = sorted(random.Random(SEED + 3).sample(sorted(entries()), 120))
WITH_UNREAD_OPERANDS = ["native_layer_norm", "_native_batch_norm_legit", "unbind", "svd"]
EXTENT = Extent(samples=2, line=6, square=3, seed=SEED)
WRONG = ("wrong", "error", "refused")


@pytest.mark.slow
@pytest.mark.few(16)
@pytest.mark.parametrize("name", SOME)
def test_an_op_is_right_on_every_layout(name):
    found = check_op(name, EXTENT)

    wrong = [f"{text}: {r}" for text, r in found if r.kind not in ("right", "random", "none")]
    assert not wrong, "\n".join(wrong[:3])


@pytest.mark.slow
@pytest.mark.few(16)
@pytest.mark.parametrize("name", dict.fromkeys([*WITH_UNREAD_OPERANDS, *PARTS]))
def test_some_outputs_of_an_op_are_right_without_the_others(name):
    """The whole of it is `python -m tests.operators --parts`."""
    extent = attrs.evolve(EXTENT, parts=True, samples=times(1, 3))
    wrong = [f"{text}: {r}" for text, r in check_op(name, extent) if r.kind in WRONG]
    assert not wrong, "\n".join(wrong[:3])


@pytest.mark.slow
@pytest.mark.few(12)
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
    from fdtensor.ops.notation import core

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


AXES = sorted(random.Random(SEED + 2).sample(sorted(entries()), 200))
ALONG_WINDOWS = [
    "cdist",
    "nn.functional.conv2d",
    "nn.functional.conv3d",
    "nn.functional.adaptive_avg_pool2d",
    "nn.functional.adaptive_max_pool3d",
    "nn.functional.pad.replicate_negative",
]


@pytest.mark.slow
@pytest.mark.few(40)
@pytest.mark.parametrize("name", dict.fromkeys([*ALONG_WINDOWS, *AXES]))
def test_what_moves_nothing_on_one_axis_moves_nothing_on_two(name):
    """The whole of it is `python -m tests.operators.axes`."""
    moved = {
        text: p.received_bytes for text, _, p in cuts_of(name, 3 if name in ALONG_WINDOWS else 1)
    }
    assert set(moved.values()) <= {0}, moved


@pytest.mark.parametrize("axes", [{"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 2}])
@pytest.mark.parametrize("pinned", [False, True])
def test_distances_of_rows_that_several_axes_cut_move_nothing(axes, pinned):
    mesh = Mesh(**axes)
    rows = mesh.layout(tuple(axes))
    x = TensorType((4096, 256), torch.float32, rows)
    y = TensorType((4096, 256), torch.float32, mesh.layout())
    assert trace(torch.cdist, x, y, out_layouts=rows if pinned else None).received_bytes == 0


@pytest.mark.parametrize("cuts", [("a", "b"), ("b", "a")])
def test_whole_groups_of_channels_may_be_cut_by_two_axes(cuts):
    """Eight groups of two channels: two axes cut them as one of four ranks would."""
    mesh = Mesh(a=2, b=2)
    x = torch.randint(-4, 5, (2, 16, 6)).double()
    weight, bias = torch.randint(-4, 5, (16, 2, 3)).double(), torch.arange(16.0).double()
    comm = SimulatedComm(mesh)

    def f(x, weight, bias):
        return torch.nn.functional.conv1d(x, weight, bias, groups=8)

    given = [
        distribute(x, mesh.layout(None, cuts), comm),
        distribute(weight, mesh.layout(cuts), comm),
        distribute(bias, mesh.layout(cuts), comm),
    ]
    assert trace(f, *given).received_bytes == 0
    assert torch.equal(spmd(f)(*given).full(), f(x, weight, bias))
