"""Tests of settings and of `sharded`: what they hold, what is smaller, what examples shrink to."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, find, given, settings
from hypothesis import strategies as st

from fdtensor import (
    DTensor,
    Layout,
    Mesh,
    Partial,
    Ragged,
    Replicate,
    Shard,
    StridedShard,
    TensorType,
    trace,
)
from fdtensor.testing import full_tensor, gather_full, sharded
from fdtensor.testing.layout_case import LayoutCase, _size, alone, smaller, smallest
from fdtensor.testing.strategies import DTYPES, shapes
from fdtensor.testing.tensor_strategies import settings_of

SHAPES = [((5, 4), torch.float32), ((4,), torch.int64)]
FLOATS = st.sampled_from([dtype for dtype in DTYPES if dtype.is_floating_point])

ANY = settings_of(SHAPES)
shrunk = settings(max_examples=400, database=None, deadline=None, derandomize=True)


# --- settings --------------------------------------------------------------------------------


@given(ANY)
def test_what_is_smaller_is_of_the_same_tensors_and_smaller(setting):
    for candidate in smaller(setting):
        assert [(t.shape, t.dtype) for t in candidate.types] == SHAPES
        assert len({t.mesh for t in candidate.types}) == 1
        assert _size(candidate) < _size(setting)
        assert candidate.seed == setting.seed
    assert {c.mesh for c in smaller(setting, same_mesh=True)} <= {setting.mesh}


@given(ANY)
def test_the_smallest_setting_of_all_is_one_replica(setting):
    least, _ = smallest(setting, lambda _: True)
    assert least.mesh.sizes == (1,)
    assert least.mesh.ranks == (0,)
    assert {p for layout in least.layouts for p in layout.placements} == {Replicate()}
    kept, _ = smallest(setting, lambda _: True, same_mesh=True)
    assert kept.mesh == setting.mesh
    assert {p for layout in kept.layouts for p in layout.placements} == {Replicate()}


WANTED = {
    "a rank more": (lambda s: s.mesh.size > 1, 2, [[Replicate()], [Replicate()]]),
    "a cut": (lambda s: _has(s, 1, Shard), 1, [[Replicate()], [Shard(0)]]),
    "real cuts": (
        lambda s: s.types[0].local_shape(s.mesh.ranks[0])[1] < 4,
        2,
        [[Shard(1)], [Replicate()]],
    ),
    "uneven blocks": (
        lambda s: len({s.types[0].local_shape(r)[0] for r in s.mesh.ranks}) > 1,
        2,
        [[Shard(0)], [Replicate()]],
    ),
    "strides": (lambda s: _has(s, 0, StridedShard), 1, None),
    "ragged blocks": (
        lambda s: _has(s, 1, Ragged) and s.mesh.size > 1,
        2,
        [[Replicate()], [Ragged(0, (2, 2))]],
    ),
    "terms of both": (
        lambda s: s.mesh.size > 1 and _has(s, 0, Partial) and _has(s, 1, Partial),
        2,
        [[Partial("sum")], [Partial("sum")]],
    ),
}


def _has(setting, place, kind):
    return any(isinstance(p, kind) for p in setting.layouts[place].placements)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", WANTED)
@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(setting=ANY)
def test_the_smallest_setting_has_no_more_than_what_is_wanted(name, setting):
    wanted, size, placements = WANTED[name]
    assume(wanted(setting))
    least, _ = smallest(setting, wanted)
    assert least.mesh.size == size
    if placements is not None:
        assert _size(least) <= _size(_line(size, placements))


def _line(size, placements):
    mesh = Mesh(x=size)
    return LayoutCase([TensorType(*kind, Layout(mesh, p)) for kind, p in zip(SHAPES, placements)])


@given(st.data(), FLOATS, shapes(), st.integers(0, 99))
def test_floats_are_split_into_terms_of_their_own_size(data, dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = (x * 10.0 ** torch.randint(-3, 4, shape, generator=generator)).to(dtype)
    pending = {"partial": ["sum", "avg"], "kinds": []}
    setting = data.draw(settings_of([(shape, dtype)], mesh=Mesh(x=3, y=2), **pending))
    (spread,) = setting.spread([x])
    whole = gather_full(spread.local, spread.type)
    torch.testing.assert_close(whole, x, rtol=16 * torch.finfo(dtype).eps, atol=0)
    assert all((local.abs() <= 64 * x.abs()).all() for local in spread.local)


def test_a_setting_of_one_rank_spreads_nothing():
    setting = alone([torch.ones(3), torch.arange(2)])
    assert repr(setting.mesh) == "Mesh(one=1)"
    assert [x.full().tolist() for x in setting.spread([torch.ones(3), torch.arange(2)])] == [
        [1, 1, 1],
        [0, 1],
    ]


# --- sharded ---------------------------------------------------------------------------------

X = torch.arange(20.0).reshape(5, 4)
TREE = (X, {"w": torch.empty(4, 3, dtype=torch.int64, device="meta"), "n": 7, "none": None})


@given(sharded(TREE))
def test_sharded_has_a_dtensor_for_each_tensor(args):
    x, rest = args
    assert isinstance(x, DTensor)
    assert torch.equal(gather_full(x.local, x.type), X)
    w = rest.pop("w")
    assert (w.shape, w.dtype, w.mesh, w.comm) == ((4, 3), torch.int64, x.mesh, x.comm)
    assert torch.equal(gather_full(w.local, w.type), full_tensor(w.type, 1))
    assert rest == {"n": 7, "none": None}
    assert 1 <= x.mesh.size <= 6


@given(sharded((X, X.T), as_types=True, mesh=Mesh(a=2, b=2), partial=["sum"], kinds=[Shard]))
def test_sharded_has_types_as_they_are_asked_for(types):
    assert {t.mesh for t in types} == {Mesh(a=2, b=2)}
    kinds = {type(p) for t in types for p in t.layout.placements}
    assert kinds <= {Shard, Partial}
    assert trace(torch.mm, *types).out_types[0].shape == (5, 5)


def test_sharded_takes_trees_without_tensors():
    assert find(sharded({"a": 1}), lambda _: True, settings=shrunk) == {"a": 1}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("wanted", "least"),
    [
        (lambda x: True, "Layout(Mesh(dp=1), (Replicate(),))"),
        (lambda x: x.mesh.size > 1, "Layout(Mesh(dp=2), (Replicate(),))"),
        (lambda x: x.layout.cuts(1), "Layout(Mesh(dp=1), (Shard(1),))"),
        (lambda x: x.local_shape(0) == (3, 4), "Layout(Mesh(dp=2), (Shard(0),))"),
        (lambda x: len(x.layout.cuts(0)) > 1, "Layout(Mesh(dp=1, tp=1), (Shard(0), Shard(0)))"),
        (
            lambda x: "sum" in x.layout.partial.values() and x.mesh.ndim == 1,
            "Layout(Mesh(dp=1), (Partial('sum'),))",
        ),
    ],
)
def test_sharded_shrinks_to_few_ranks_then_replicas(wanted, least):
    found, _ = find(
        sharded((X, X), as_types=True), lambda pair: bool(wanted(pair[0])), settings=shrunk
    )
    assert repr(found.layout) == least


@pytest.mark.parametrize("kind", [Shard, StridedShard, Ragged, Partial])
def test_sharded_draws_every_placement(kind):
    once = settings(shrunk, phases=[Phase.generate])
    find(sharded(X), lambda x: any(isinstance(p, kind) for p in x.layout.placements), settings=once)


def test_replicas_that_are_nan_agree():
    type_ = TensorType((2,), torch.float32, Mesh(x=2).layout())
    held = torch.tensor([float("nan"), 1.0])
    assert torch.equal(gather_full((held, held.clone()), type_).isnan(), held.isnan())
    with pytest.raises(AssertionError, match="rank 1 is no replica"):
        gather_full((held, torch.ones(2)), type_)
