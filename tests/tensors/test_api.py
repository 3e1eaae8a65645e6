"""Tests of tensors/connect.py: redistributing pytrees."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdtensor.layouts.errors import PlanError, ValueTreeError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.connect import FUSED_BYTES, redistribute
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.testing.strategies import redistributions
from fdtensor.testing.values import full_tensor, gather_full, scatter

MESH = Mesh(dp=2, tp=2)
ROWS, COLUMNS = Layout(MESH, [Shard(0), Replicate()]), Layout(MESH, [Replicate(), Shard(1)])
WHOLE = Layout(MESH, [Replicate(), Replicate()])

Pair = namedtuple("Pair", "a b")


def some(comm, *shape, layout=ROWS):
    return distribute(torch.arange(float(torch.Size(shape).numel())).reshape(shape), layout, comm)


@pytest.fixture
def comm():
    return SimulatedComm(MESH)


# --- trees -----------------------------------------------------------------------------------


@given(st.lists(redistributions(cross_mesh=True, dtype=None), max_size=4))
def test_every_leaf_gets_its_layout(pairs):
    comm = SimulatedComm(Mesh(world=8))
    tree = [DTensor(scatter(full_tensor(s, 0), s, 0), s, comm) for s, _ in pairs]
    out = redistribute(tree, [dst for _, dst in pairs])
    for y, (src, dst) in zip(out, pairs, strict=True):
        assert y.type is dst
        assert torch.equal(gather_full(y.local, dst), full_tensor(src, 0))


def test_one_layout_is_for_every_leaf_and_a_prefix_for_what_is_below_it(comm):
    tree = {"w": some(comm, 4, 4), "rest": Pair([some(comm, 2, 2)], (some(comm, 3, 2), None))}
    out = redistribute(tree, WHOLE)
    assert [x.layout for x in (out["w"], out["rest"].a[0], out["rest"].b[0])] == [WHOLE] * 3
    assert isinstance(out["rest"], Pair)
    assert out["rest"].b[1] is None
    out = redistribute(tree, {"w": COLUMNS, "rest": Pair(WHOLE, (ROWS, None))})
    assert [x.layout for x in (out["w"], out["rest"].a[0], out["rest"].b[0])] == [
        COLUMNS,
        WHOLE,
        ROWS,
    ]
    assert all(
        torch.equal(out["rest"].a[0].local[r], torch.arange(4.0).reshape(2, 2)) for r in MESH.ranks
    )


def test_a_type_is_as_good_as_a_layout(comm):
    x = some(comm, 4, 4)
    assert redistribute([x], x.type.with_layout(COLUMNS))[0].layout is COLUMNS
    assert redistribute(x, x.type.with_layout(COLUMNS)).layout is COLUMNS


def test_other_leaves_come_back_as_they_are(comm):
    tensor, thing = torch.ones(3), object()
    tree = OrderedDict(x=some(comm, 2, 2), t=tensor, n=3, thing=thing, none=None)
    out = redistribute(tree, COLUMNS)
    assert list(out) == list(tree)
    assert out["x"].layout is COLUMNS
    assert (out["t"], out["n"], out["thing"], out["none"]) == (tensor, 3, thing, None)
    assert redistribute([1, "x"], WHOLE) == [1, "x"]
    assert redistribute({}, WHOLE) == {}
    assert comm.calls["exchange"] <= 1


def test_what_is_not_a_dtensor_needs_no_layout(comm):
    out = redistribute({"x": some(comm, 2, 2), "t": 3}, {"x": COLUMNS, "t": "whatever"})
    assert (out["x"].layout, out["t"]) == (COLUMNS, 3)


def test_leaves_of_several_comms_move_on_their_own():
    one, two = SimulatedComm(MESH), SimulatedComm(MESH)
    x, y = redistribute([some(one, 4, 4), some(two, 4, 4)], WHOLE)
    assert (x.comm, y.comm) == (one, two)
    assert torch.equal(x.full(), y.full())


def test_large_tensors_travel_by_themselves(comm):
    large = FUSED_BYTES // 4 * 2 + 2
    tree = [some(comm, large), some(comm, 4), some(comm, 6)]
    out = redistribute(tree, WHOLE)
    assert comm.calls == {"all_gather": 1, "exchange": 1}
    for x, y in zip(tree, out, strict=True):
        assert torch.equal(x.full(), y.local[3])


def test_a_budget_is_for_each_tensor(comm):
    tree = [some(comm, 8, 8), some(comm, 4, 4)]
    least = max(x.plan_to(WHOLE).peak_bytes for x in tree)
    out = redistribute(tree, WHOLE, max_bytes=least)
    assert all(torch.equal(x.full(), y.local[0]) for x, y in zip(tree, out, strict=True))
    with pytest.raises(ValueTreeError, match="2 of 2 DTensors cannot be redistributed"):
        redistribute(tree, WHOLE, max_bytes=1)


# --- mistakes --------------------------------------------------------------------------------


def test_all_leaves_that_have_no_plan_are_named(comm):
    tree = {"w": some(comm, 4, 4), "b": some(comm, 4), "more": [some(comm, 3), some(comm, 2, 2), 7]}
    with pytest.raises(ValueTreeError) as raised:
        redistribute(tree, {"w": COLUMNS, "b": COLUMNS, "more": [COLUMNS, "rows", "cut"]})
    assert str(raised.value) == NO_PLANS
    assert not comm.received


def test_another_shape_or_dtype_is_no_target(comm):
    x = some(comm, 4, 4)
    wrong = TensorType((4, 5), x.dtype, ROWS)
    with pytest.raises(ValueTreeError, match="1 of 2 DTensors cannot be redistributed"):
        redistribute([x, x], [ROWS, wrong])
    with pytest.raises(PlanError):
        redistribute(x, wrong)


def test_every_place_where_the_layouts_do_not_fit_is_named(comm):
    x = some(comm, 4, 4)
    tree = {"w": x, "more": [x, x], "last": (x, {"y": x})}
    with pytest.raises(ValueTreeError) as raised:
        redistribute(tree, {"w": ROWS, "more": [ROWS], "last": (ROWS, {"z": ROWS})})
    assert str(raised.value) == NO_PREFIX
    with pytest.raises(ValueTreeError, match="do not have the structure") as raised:
        redistribute(tree, [ROWS])
    assert raised.value.facts == {"layouts": "a list in place of a dict"}
    with pytest.raises(ValueTreeError, match="do not have the structure"):
        redistribute([x, x], [ROWS, None])


NO_PLANS = """\
3 of 4 DTensors cannot be redistributed.

  tree['b']:       mesh axis 'tp' shards dim 1 of a tensor that has 1 dims.
  tree['more'][0]: mesh axis 'tp' shards dim 1 of a tensor that has 1 dims.
  tree['more'][1]: 'rows' is not a Layout.

Pass one layout, or a pytree of layouts like the tree or a prefix of it."""

NO_PREFIX = """\
the layouts do not have the structure of the tree.

  layouts['last'][1]: different keys: lacks 'y', has 'z' beside
  layouts['more']:    1 in place of 2 entries

Pass one layout, or a pytree of layouts like the tree or a prefix of it."""
