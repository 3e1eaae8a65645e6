"""Tests of layouts/placement.py."""

import pytest
import torch
from hypothesis import given

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.placement import (
    REDUCE_OPS,
    Partial,
    Ragged,
    Replicate,
    Shard,
    StridedShard,
    parse_placement,
)
from fdtensor.testing.strategies import placements

NOTATION = [
    (Replicate(), "R", "Replicate()"),
    (Shard(0), "S(0)", "Shard(0)"),
    (StridedShard(0, 2), "S(0, f=2)", "StridedShard(0, 2)"),
    (StridedShard(dim=1, split_factor=3), "S(1, f=3)", "StridedShard(1, 3)"),
    (Ragged(0, [3, 5]), "S(0, [3,5])", "Ragged(0, (3, 5))"),
    (Ragged(2, (0,)), "S(2, [0])", "Ragged(2, (0,))"),
    (Partial(), "P(sum)", "Partial('sum')"),
    (Partial("max"), "P(max)", "Partial('max')"),
]


@pytest.mark.parametrize(("placement", "text", "source"), NOTATION)
def test_a_placement_prints_as_notation_and_as_source(placement, text, source):
    assert str(placement) == text
    assert repr(placement) == source


@given(placements())
def test_both_printed_forms_of_a_placement_are_read_back(placement):
    assert parse_placement(str(placement)) is placement
    assert parse_placement(repr(placement)) is placement
    assert parse_placement(f"  {placement} ") is placement


@pytest.mark.parametrize("op", REDUCE_OPS)
def test_every_reduce_op_may_be_pending(op):
    assert Partial(op).reduce_op == op


def test_a_number_of_any_integer_type_is_the_same():
    assert Shard(torch.tensor(1)) is Shard(1)
    assert Ragged(0, torch.tensor([3, 5])) is Ragged(0, (3, 5))
    assert Ragged(0, range(3)) is Ragged(0, (0, 1, 2))


@pytest.mark.parametrize("dim", [-1, 1.0, "0", None, True])
@pytest.mark.parametrize("make", [Shard, lambda d: StridedShard(d, 2), lambda d: Ragged(d, (1,))])
def test_a_dim_counts_from_the_front(make, dim):
    with pytest.raises(LayoutError, match="is not a tensor dim"):
        make(dim)


@pytest.mark.parametrize("factor", [0, -2, 1.5, None, True])
def test_a_split_factor_is_a_positive_int(factor):
    with pytest.raises(LayoutError, match="is not a split factor"):
        StridedShard(0, factor)


@pytest.mark.parametrize("sizes", [(1, -1), 3, "12", (1.5,), None, (True,)])
def test_ragged_sizes_are_ints_of_0_or_more(sizes):
    with pytest.raises(LayoutError, match="are not the sizes"):
        Ragged(0, sizes)


@pytest.mark.parametrize("op", ["mean", "SUM", "", None, 0])
def test_other_reduce_ops_are_refused(op):
    with pytest.raises(LayoutError, match="is not a reduce op"):
        Partial(op)


@pytest.mark.parametrize("text", ["", "S", "S()", "S(0", "S(0, 3, 5)", "R()", "T(0)", "R R"])
def test_other_notation_is_refused(text):
    with pytest.raises(LayoutError, match="is not a placement"):
        parse_placement(text)
