"""Tests of ops/decompositions/{sort,kth}.py: sorts and medians along a dim that is cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor import Layout, Mesh, SimulatedComm, TensorType, run, shards, trace, verify
from fdtensor.layouts.placement import Shard
from fdtensor.ops.decompositions.kth import (
    DIGIT_COUNTS,
    KEYS,
    MANY,
    NEXT_DIGIT,
    OF_KEYS,
    _each,
    _select,
)
from fdtensor.ops.decompositions.sort import BY_PLACE, sort
from tests.operators.check import BYTES

few = settings(max_examples=max(3, settings.default.max_examples // 4))

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@st.composite
def numbers(draw, least=1, most=40):
    """Three rows of few or many different numbers, with NaN and infinities among floats."""
    count, dtype = draw(st.integers(least, most)), draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    x = torch.randint(-draw(st.sampled_from([1, 3, 100])), 100, (3, count), generator=generator)
    if dtype.is_floating_point and draw(st.booleans()):
        kinds = torch.rand(3, count, generator=generator)
        x = torch.where(kinds < 0.1, torch.nan, x / 7)
        x = torch.where((kinds > 0.8) & (kinds < 0.9), torch.inf, x)
        x = torch.where(kinds > 0.9, -torch.inf, x)
    return (x % 2 if dtype == torch.bool else x.clamp(min=0) if dtype == torch.uint8 else x).to(
        dtype
    )


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def received(f, x):
    """The bytes of the function on eight ranks that cut the rows, if all give what `f` gives."""
    mesh = Mesh(x=8)
    layout = Layout(mesh, [Shard(0)])
    program = trace(f, TensorType(x.shape, x.dtype, layout), cost=BYTES)
    outs = run(program, [shards(x, layout)], SimulatedComm(mesh))
    wanted = f(x) if isinstance(f(x), tuple) else (f(x),)
    for blocks, t, full in zip(outs, program.out_types, wanted):
        assert all(same(a, b) for a, b in zip(blocks, shards(full, t.layout)))
    return program.received_bytes


# --- sorts ----------------------------------------------------------------------------------------


@few
@given(st.data(), st.integers(2, 6), st.sampled_from([0, 1, -1]), st.booleans())
def test_blocks_are_sorted_as_one_and_equals_stay_in_order(data, blocks, dim, descending):
    least = 2 * blocks * (blocks - 1) ** 2
    x = data.draw(numbers(least, least + 50))
    x = x.T if dim == 0 else x
    values, places = sort(blocks, x, dim, descending)
    wanted, order = torch.sort(x, stable=True, dim=dim, descending=descending)
    assert same(values, wanted)
    assert same(places, order)


def test_short_blocks_are_refused_and_the_op_gathers():
    with pytest.raises(NotImplementedError):
        sort(4, torch.randn(4 * 12), 0)


@few
@given(numbers())
def test_places_are_in_order_where_values_are_equal(x):
    values, order = torch.sort(x, dim=-1)
    assert same(BY_PLACE(values, order.flip(-1)).sort(-1).values, order.sort(-1).values)
    assert same(BY_PLACE(values, order), torch.sort(x, dim=-1, stable=True).indices)
    assert verify(BY_PLACE, [(values, order)]) == []


@pytest.mark.parametrize("rows", [8192, 8100])
@pytest.mark.parametrize("descending", [False, True])
def test_a_cut_dim_is_sorted_in_three_deals(rows, descending):
    """Two all-to-alls and halves that go there and back: less than all others have."""
    x = torch.randint(-1000, 1000, (rows,)).float()
    x[::100], x[7::101] = torch.nan, -0.0
    values = received(lambda x: x.sort(descending=descending)[0], x)
    assert values <= 2.75 * -(-rows // 8) * 4 + 8 * 64
    places = received(lambda x: tuple(x.sort(descending=descending, stable=True)), x)
    assert places <= 2 * values


# --- the k-th -------------------------------------------------------------------------------------


@few
@given(st.data(), numbers())
def test_the_kth_by_its_digits_is_that_of_a_sort(data, x):
    k = data.draw(st.integers(1, x.shape[1]))
    values, places = _select(x, _each(x, k, 1), 1, True)
    wanted = torch.sort(x, dim=1).values[:, k - 1 : k]
    assert same(values, wanted)
    assert same(x.gather(1, places), wanted)


@few
@given(numbers())
def test_rows_of_digits_hold_for_any_keys(x):
    keys = KEYS(x)
    known, k = torch.zeros(3, 1, dtype=keys.dtype), torch.ones(3, 1, dtype=torch.int64)
    top = 8 * keys.itemsize - 8
    assert same(OF_KEYS(keys, x.dtype), x)
    assert verify(KEYS, [(x,)]) == []
    assert verify(OF_KEYS, [(keys, x.dtype)]) == []
    for shift in (top, 0):
        assert verify(DIGIT_COUNTS, [(keys, known, shift, 1)]) == []
        counts = DIGIT_COUNTS(keys, known, shift, 1)
        assert verify(NEXT_DIGIT, [(counts, known, k, shift, 1)]) == []


SELECTED = {
    "median": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(),
    "median of a dim": lambda x: x.median(0)[0],
    "nanmedian of a dim": lambda x: x.nanmedian(0, keepdim=True)[0],
    "kthvalue": lambda x: x.kthvalue(MANY + 100, 0)[0],
    "where the median is": lambda x: x.gather(0, x.median(0, keepdim=True)[1]),
}


@pytest.mark.one_of("dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.float64])
@pytest.mark.parametrize("name", SELECTED)
def test_of_a_cut_dim_counts_of_digits_move(name, dtype):
    x = torch.randint(-30000, 30000, (10_001, 3)).to(dtype)
    if "where" not in name and dtype.is_floating_point:
        x[5, 0] = torch.nan
    assert 0 < received(SELECTED[name], x) <= 2 * 3 * dtype.itemsize * 256 * 8
