"""Tests of testing: what the other tests stand on."""

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import fdtensor.testing
from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import REDUCE_OPS, Partial, Ragged, Replicate, Shard, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.testing.strategies import DTYPES, meshes, redistributions, types
from fdtensor.testing.values import block, full_tensor, gather_full, reduced, scatter

SEEDS = st.integers(0, 2**31)
OTHER_DTYPES = (torch.float8_e4m3fn, torch.uint16, torch.uint64, torch.float16, torch.int8)
ANY_DTYPE = st.sampled_from((*DTYPES, *OTHER_DTYPES))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.to(torch.complex128), b.to(torch.complex128))


def pending(op: str, dtype: torch.dtype) -> list[TensorType]:
    """A type of 50 elements with terms on 2 x 3 ranks, if the dtype has the reduce op."""
    try:
        return [TensorType((50,), dtype, Layout(Mesh(x=2, y=3), [Partial(op)] * 2))]
    except LayoutError:
        return []


PENDING = [type for op in REDUCE_OPS for dtype in DTYPES for type in pending(op, dtype)]


@given(ANY_DTYPE.flatmap(lambda dtype: types(dtype=dtype)), SEEDS)
def test_scattered_blocks_gather_to_the_tensor(type, seed):
    tensor = full_tensor(type, seed)
    assert (tuple(tensor.shape), tensor.dtype) == (type.shape, type.dtype)
    blocks = scatter(tensor, type, seed)
    assert [tuple(b.shape) for b in blocks] == [type.local_shape(r) for r in type.mesh.ranks]
    assert same(gather_full(blocks, type), tensor)


@pytest.mark.parametrize("type", PENDING, ids=str)
def test_every_rank_holds_a_random_term(type):
    tensor = full_tensor(type, 0)
    terms = scatter(tensor, type, 0)
    for i, term in enumerate(terms):
        assert not same(term, tensor)
        assert not any(same(term, other) for other in terms[:i])


@pytest.mark.parametrize("type", PENDING, ids=str)
def test_terms_may_be_reduced_in_any_order_and_one_axis_at_a_time(type):
    op = type.layout.partial["x"]
    tensor = full_tensor(type, 1)
    terms = torch.stack(scatter(tensor, type, 1))
    assert same(reduced(terms.flip(0), op), tensor)
    assert same(reduced(reduced(terms.reshape(2, 3, 50), op), op), tensor)
    assert same(reduced(reduced(terms.reshape(2, 3, 50).transpose(0, 1), op), op), tensor)


@pytest.mark.parametrize("op", ["sum", "product", "max", "min", "band", "bor", "bxor"])
def test_a_reduction_is_that_of_torch(op):
    theirs = {"sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}
    theirs |= {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
    for dtype in (torch.int64, torch.uint8, torch.bool):
        a, b = torch.arange(12).reshape(2, 6).to(dtype)
        assert same(reduced(torch.stack([a, b]), op), theirs[op](a, b))


def test_an_average_divides_by_the_number_of_terms():
    assert same(reduced(torch.tensor([[1.0, 2.0], [4.0, 4.0]]), "avg"), torch.tensor([2.5, 3.0]))


def test_a_block_is_a_copy():
    type = TensorType((4,), torch.int64, Layout(Mesh(x=2), [Replicate()]))
    tensor = full_tensor(type, 0)
    block(tensor, type, 0).zero_()
    assert tensor.any()


def test_replicas_hold_one_term():
    type = TensorType((9,), torch.int64, Layout(Mesh(x=2, y=2), [Partial(), Replicate()]))
    a, b, c, d = scatter(full_tensor(type, 0), type, 0)
    assert same(a, b)
    assert same(c, d)


def test_values_depend_on_the_seed_only():
    type = TensorType((50,), torch.int64, Layout(Mesh(x=2), [Partial()]))
    tensor = full_tensor(type, 3)
    assert same(tensor, full_tensor(type, 3))
    assert not same(tensor, full_tensor(type, 4))
    assert same(scatter(tensor, type, 3)[0], scatter(tensor, type, 3)[0])
    assert not same(scatter(tensor, type, 3)[0], scatter(tensor, type, 4)[0])
    assert not any(same(term, tensor) for term in scatter(tensor, type, 3))


@pytest.mark.parametrize(
    ("layout", "damage"),
    [
        (Layout(Mesh(x=2), [Replicate()]), lambda a, b: (a, b + 1)),
        (Layout(Mesh(x=2), [Shard(0)]), lambda a, b: (a, b[:1])),
        (Layout(Mesh(x=2), [Shard(0)]), lambda a, b: (a, b.int())),
        (Layout(Mesh(x=2, y=2), [Partial(), Replicate()]), lambda a, b, c, d: (a, b, c, c + 1)),
    ],
)
def test_gathering_sees_blocks_that_do_not_fit(layout, damage):
    type = TensorType((4,), torch.int64, layout)
    blocks = scatter(full_tensor(type, 0), type, 0)
    assert same(gather_full(blocks, type), full_tensor(type, 0))
    with pytest.raises(AssertionError):
        gather_full(damage(*blocks), type)


def exists(strategy, wanted) -> bool:
    fast = settings(max_examples=1000, database=None, deadline=None, phases=[Phase.generate])
    find(strategy, wanted, settings=fast)  # raises where it finds none
    return True


@pytest.mark.parametrize("kind", [Replicate, Shard, StridedShard, Ragged, Partial])
def test_types_have_every_placement_on_every_axis(kind):
    for i in range(3):
        assert exists(
            types(),
            lambda t: t.mesh.ndim == 3 and isinstance(t.layout.placements[i], kind),  # noqa: B023
        )


@pytest.mark.parametrize(
    "wanted",
    [
        lambda t: t.layout.order,
        lambda t: len(t.layout.cuts(0)) == 3,
        lambda t: len(t.layout.partial) == 3,
        lambda t: t.shape == (),
        lambda t: 0 in t.shape,
        lambda t: t.mesh.size == 1 < t.mesh.ndim,
        lambda t: t.mesh.ndim == 0,
        lambda t: t.mesh.ranks != tuple(range(t.mesh.size)),
        lambda t: any(isinstance(p, Ragged) and 0 in p.sizes for p in t.layout.placements),
    ],
)
def test_types_have_every_corner(wanted):
    assert exists(types(), wanted)


@pytest.mark.parametrize(
    "wanted",
    [
        lambda a, b: not {*a} & {*b},
        lambda a, b: {*a} & {*b} and {*a} - {*b} and {*b} - {*a},
        lambda a, b: {*a} < {*b},
        lambda a, b: {*a} > {*b},
        lambda a, b: {*a} == {*b} and a != b,
    ],
)
def test_two_meshes_lie_in_every_way(wanted):
    pairs = redistributions(cross_mesh=True)
    assert exists(pairs, lambda pair: wanted(pair[0].mesh.ranks, pair[1].mesh.ranks))


@given(redistributions(world=5, cross_mesh=True, dtype=None, dst_partial=False))
def test_a_redistribution_is_of_one_tensor(pair):
    src, dst = pair
    assert (src.shape, src.dtype) == (dst.shape, dst.dtype)
    assert max(*src.mesh.ranks, *dst.mesh.ranks) < 5
    assert dst.layout.partial == {}


@given(st.data())
def test_what_is_pinned_is_not_drawn(data):
    mesh = data.draw(meshes(max_axes=2, max_size=4, max_ranks=6, world=[9, 3, 4, 7, 1]))
    assert mesh.ndim <= 2
    assert mesh.size <= 5
    assert {*mesh.ranks} <= {9, 3, 4, 7, 1}
    src, dst = data.draw(redistributions(mesh=mesh, shape=(4,), dtype=torch.bool, partial=["bor"]))
    assert src.mesh is dst.mesh is mesh
    assert (src.shape, src.dtype) == ((4,), torch.bool)
    assert {*src.layout.partial.values(), *dst.layout.partial.values()} <= {"bor"}


@pytest.mark.parametrize("name", fdtensor.testing.__all__)
def test_the_package_has_the_names_of_its_modules(name):
    assert getattr(fdtensor.testing, name).__name__ == name
