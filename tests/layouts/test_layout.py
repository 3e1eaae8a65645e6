"""Tests of layouts/layout.py: which indices each rank holds, and which layouts there are."""

from itertools import chain
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import _StridedShard

from fdtensor.layouts.blocks import intersect, length, locate, merged
from fdtensor.layouts.dtypes import dtype_name, parse_dtype
from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Ragged, Replicate, Shard, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.testing.strategies import DTYPES, layouts, meshes, placements, shapes, types
from fdtensor.testing.values import block

MESH = Mesh(dp=2, tp=2)
R, S0, P = Replicate(), Shard(0), Partial()
FACTORS = st.integers(1, 3)


def chunk(tensor: torch.Tensor, count: int, index: int, dim: int = 0) -> torch.Tensor:
    """Block `index` of `torch.chunk(tensor, count)`, which leaves out empty ones at the end."""
    chunks = torch.chunk(tensor, count, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


@given(types())
def test_the_blocks_along_the_axes_that_cut_a_dim_partition_it(type):
    mesh = type.mesh
    for dim, size in enumerate(type.shape):
        cutting = type.layout.cuts(dim)
        for rank in mesh.ranks:
            blocks = [type.index(r)[dim] for r in mesh.coset(cutting, mesh.coord(rank))]
            assert sorted(chain(*blocks)) == list(range(size))


@given(types())
def test_other_axes_do_not_change_the_block_of_a_dim(type):
    mesh = type.mesh
    for dim in range(len(type.shape)):
        other = [axis for axis in mesh.axes if axis not in type.layout.cuts(dim)]
        for rank in mesh.ranks:
            blocks = [type.index(r)[dim] for r in mesh.coset(other, mesh.coord(rank))]
            assert len(set(map(tuple, blocks))) == 1


@given(types(dtype=None))
def test_local_shapes_offsets_and_bytes_are_those_of_the_indices(type):
    assert type.nbytes == prod(type.shape) * type.dtype.itemsize
    for rank in type.mesh.ranks:
        index = type.index(rank)
        assert all(list(indices) == sorted(set(indices)) for indices in index)
        assert type.local_shape(rank) == tuple(map(len, index))
        assert type.local_nbytes(rank) == prod(map(len, index)) * type.dtype.itemsize
        starts = [min(indices, default=size) for indices, size in zip(index, type.shape)]
        assert type.offset(rank) == tuple(starts)


@given(types(kinds=(Replicate, Shard)))
def test_shards_are_cut_as_torch_chunk_cuts_one_inside_the_other(type):
    tensor = torch.arange(prod(type.shape)).reshape(type.shape)
    for rank in type.mesh.ranks:
        local = tensor
        for dim in range(len(type.shape)):
            for axis in type.layout.cuts(dim):
                i = type.mesh.axis(axis)
                local = chunk(local, type.mesh.sizes[i], type.mesh.coord(rank)[i], dim)
        assert torch.equal(block(tensor, type, rank), local)


@given(placements((1, 1, 1), partial=False, kinds=(StridedShard,)), st.integers(0, 20))
def test_a_strided_shard_holds_its_part_of_every_block(placement, size):
    type = TensorType((size,) * 3, torch.int64, Layout(Mesh(x=3), [placement]))
    blocks = torch.chunk(torch.arange(size), placement.split_factor)
    for rank in range(3):
        parts = torch.cat([chunk(part, 3, rank) for part in blocks])
        assert list(type.index(rank)[placement.dim]) == parts.tolist()


@given(st.integers(0, 4), FACTORS, FACTORS)
def test_an_even_strided_shard_is_that_of_torch(size, count, factor):
    tensor = torch.arange(size * count * factor)
    layout = Layout(Mesh(x=count), [StridedShard(0, factor)])
    type = TensorType(tensor.shape, tensor.dtype, layout)
    theirs, _ = _StridedShard(0, split_factor=factor)._split_tensor(tensor, count)
    for rank in range(count):
        assert torch.equal(block(tensor, type, rank), theirs[rank])


@given(st.integers(1, 4), FACTORS, FACTORS)
def test_a_strided_shard_of_the_outer_axis_is_a_cut_after_the_inner_one(size, dp, tp):
    mesh = Mesh(dp=dp, tp=tp)
    tensor = torch.arange(size * dp * tp)
    strided = Layout(mesh, [StridedShard(0, tp), S0])
    swapped = Layout(mesh, [S0, S0], order={0: ("tp", "dp")})
    theirs, _ = _StridedShard(0, split_factor=tp)._split_tensor(tensor, dp)
    for rank in mesh.ranks:
        i, j = mesh.coord(rank)
        expected = chunk(theirs[i], tp, j)
        for layout in (strided, swapped):
            type = TensorType(tensor.shape, tensor.dtype, layout)
            assert torch.equal(block(tensor, type, rank), expected)


@given(types(shape=(7,), partial=False, kinds=(Ragged,)))
def test_a_ragged_shard_has_the_sizes_given(type):
    for axis, placement in zip(type.mesh.axes, type.layout.placements):
        if isinstance(placement, Ragged) and type.layout.cuts(0) == (axis,):
            held = [type.index(rank)[0] for rank in type.mesh.coset([axis], type.mesh.coord(0))]
            assert list(map(len, held)) == list(placement.sizes)
            assert list(chain(*held)) == list(range(7))


def test_an_empty_block_starts_at_the_end_of_the_dim():
    type = TensorType((3, 4), torch.float32, Layout(Mesh(x=3), [S0]))
    assert [type.offset(rank) for rank in range(3)] == [(0, 0), (1, 0), (2, 0)]
    type = TensorType((4,), torch.float32, Layout(Mesh(x=3), [S0]))
    assert [type.index(rank) for rank in range(3)] == [
        (range(2),),
        (range(2, 4),),
        (range(4, 4),),
    ]
    assert type.offset(2) == (4,)


def test_blocks_follow_the_coordinate_not_the_rank():
    type = TensorType((4,), torch.float32, Layout(Mesh.from_ranks([5, 2], "x"), [S0]))
    assert (type.index(5), type.index(2)) == ((range(2),), (range(2, 4),))


INTERVALS = st.sets(st.integers(0, 15)).map(lambda s: merged([(i, i + 1) for i in sorted(s)]))


def indices(intervals):
    return [i for start, stop in intervals for i in range(start, stop)]


@given(INTERVALS, INTERVALS)
def test_the_intersection_of_intervals_is_that_of_their_indices(a, b):
    both = intersect(a, b)
    assert indices(both) == sorted({*indices(a)} & {*indices(b)})
    assert length(both) == len(indices(both))
    assert [indices(a)[i] for i in indices(locate(a, both))] == indices(both)


@given(layouts(kinds=(Replicate, Shard)))
def test_a_layout_written_per_dim_is_read_back(layout):
    assert layout.mesh.layout(*layout.per_dim(), partial=layout.partial) is layout


@given(layouts())
def test_the_order_of_a_layout_says_all_that_is_not_left_to_right(layout):
    full = {dim: layout.cuts(dim) for dim in range(3)}
    assert Layout(layout.mesh, layout.placements, full) is layout
    assert Layout(layout.mesh, list(layout.placements), layout.order) is layout
    assert all(axes != tuple(sorted(axes, key=layout.mesh.axis)) for _, axes in layout.order)


@given(meshes(), st.data())
def test_placing_an_axis_leaves_the_others(mesh, data):
    layout = data.draw(layouts(mesh, (4, 5), partial=["sum"], kinds=(Replicate, Shard)))
    for axis, count in zip(mesh.axes, mesh.sizes):
        to = data.draw(placements((4, 5), count, partial=["sum"], kinds=(Replicate, Shard)))
        placed = layout.placed(axis, to)
        assert placed[axis] is to
        for dim in range(2):
            before = [a for a in layout.cuts(dim) if a != axis]
            assert [a for a in placed.cuts(dim) if a != axis] == before
        assert {a: placed[a] for a in mesh.axes if a != axis} == {
            a: layout[a] for a in mesh.axes if a != axis
        }
        assert layout.placed(axis, layout[axis]) is layout


@given(types(shape=(5, 7), kinds=(Replicate, Shard)))
def test_splitting_adds_the_innermost_cut(type):
    layout = type.layout
    for axis in [a for a in layout.mesh.axes if isinstance(layout[a], Replicate)]:
        split = layout.split(axis, 1)
        assert split.cuts(1) == (*layout.cuts(1), axis)
        assert split.cuts(0) == layout.cuts(0)


@given(types())
def test_the_cotangent_of_a_type_has_nothing_pending(type):
    cotangent = type.cotangent()
    assert cotangent.layout.partial == {}
    for axis in type.mesh.axes:
        pending = axis in type.layout.partial
        assert cotangent.layout[axis] is (R if pending else type.layout[axis])
    assert all(cotangent.index(rank) == type.index(rank) for rank in type.mesh.ranks)


def test_an_order_may_be_a_mapping_pairs_or_one_entry_a_dim():
    orders = ({0: ("tp", "dp")}, {0: ["tp", "dp"]}, [(0, ("tp", "dp"))], [("tp", "dp")])
    assert len({Layout(MESH, [S0, S0], order) for order in orders}) == 1
    assert Layout(MESH, [S0, S0], {0: ("dp", "tp")}) is Layout(MESH, [S0, S0])


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: Layout(MESH, [S0]), "1 placements for a mesh that has 2 axes"),
        (lambda: Layout(MESH, [S0, R, R]), "3 placements for a mesh that has 2 axes"),
        (lambda: Layout(MESH, S0), "1 placements for a mesh that has 2 axes"),
        (lambda: Layout(MESH, "RR"), "'R' is not a placement"),
        (lambda: Layout(MESH, [S0, S0], {0: ("tp",)}), "the order of dim 0 names 'tp'"),
        (lambda: Layout(MESH, [S0, S0], {1: ("tp", "dp")}), "the order of dim 1 names"),
        (lambda: Layout(MESH, [S0, S0], {0: ("tp", "tp")}), "the order of dim 0 names"),
        (lambda: Layout(MESH, [S0, S0], {"0": ("tp", "dp")}), "is not an order"),
        (lambda: Layout(MESH, [S0, S0], {0: 1}), "names no mesh axes"),
        (lambda: Layout(MESH, [P, Partial("max")]), "different reduce ops"),
        (
            lambda: Layout(MESH, [Ragged(0, (1, 2, 3)), R]),
            "its ragged shard has 3",
        ),
        (lambda: Layout(MESH, [S0, Ragged(0, (1, 2))]), "is not the first cut"),
        (lambda: Layout(MESH, [Ragged(0, (1, 2)), S0], [("tp", "dp")]), "is not the first cut"),
        (lambda: Layout(MESH, [Ragged(0, (1, 2))] * 2), "is not the first cut"),
        (lambda: MESH.layout("dp", "dp"), "'dp' is used twice"),
        (lambda: MESH.layout(("dp", "dp")), "'dp' is used twice"),
        (lambda: MESH.layout(1), "names no mesh axes"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(build, sentence):
    with pytest.raises(LayoutError) as raised:
        build()
    assert sentence in raised.value.sentence


def test_a_ragged_shard_may_be_the_first_cut_of_a_dim_by_its_order():
    layout = Layout(MESH, [S0, Ragged(0, (1, 2))], {0: ("tp", "dp")})
    assert TensorType((3,), torch.int64, layout).index(3) == (range(2, 3),)


CAN_AVG = {torch.float32, torch.float64, torch.bfloat16, torch.complex64}
HAS_BITS = {torch.int64, torch.int16, torch.uint8, torch.bool}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reduce_op_is_pending_only_where_the_dtype_has_it(dtype):
    refused = set() if dtype in CAN_AVG else {"avg"}
    refused |= set() if dtype in HAS_BITS else {"band", "bor", "bxor"}
    refused |= {"max", "min"} if dtype.is_complex else set()
    for op in ("sum", "avg", "product", "max", "min", "band", "bor", "bxor"):
        layout = Layout(Mesh(x=2), [Partial(op)])
        if op in refused:
            with pytest.raises(LayoutError, match=f"^{dtype_name(dtype)} has no {op}"):
                TensorType((), dtype, layout)
        else:
            assert TensorType((), dtype, layout).layout.partial == {"x": op}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_moves_but_has_no_reduction(dtype):
    assert TensorType((4,), dtype, Layout(Mesh(x=2), [S0])).local_nbytes(0) == 2
    with pytest.raises(LayoutError, match="has no sum"):
        TensorType((4,), dtype, Layout(Mesh(x=2), [P]))


@given(shapes(), st.integers(0, 5))
def test_a_dim_out_of_range_is_refused(shape, dim):
    for placement in (Shard(dim), StridedShard(dim, 2), Ragged(dim, (*shape, 0)[dim : dim + 1])):
        count = len(placement.sizes) if isinstance(placement, Ragged) else 2
        if dim < len(shape):
            TensorType(shape, torch.int64, Layout(Mesh(x=count), [placement]))
        elif count:
            with pytest.raises(LayoutError, match=f"shards dim {dim} of a tensor that has"):
                TensorType(shape, torch.int64, Layout(Mesh(x=count), [placement]))


@given(shapes(), st.lists(st.integers(0, 7), min_size=1, max_size=3))
def test_ragged_sizes_that_do_not_add_up_to_the_dim_are_refused(shape, sizes):
    layout = Layout(Mesh(x=len(sizes)), [Ragged(0, sizes)])
    if shape and sum(sizes) == shape[0]:
        assert TensorType(shape, torch.int64, layout).local_shape(0)[0] == sizes[0]
    else:
        with pytest.raises(LayoutError, match=r"add up to|shards dim 0 of a tensor"):
            TensorType(shape, torch.int64, layout)


@pytest.mark.parametrize("shape", [(-1,), (1.5,), 3, None, ("2",), (True,)])
def test_a_shape_is_ints_of_0_or_more(shape):
    with pytest.raises(LayoutError, match="is not a shape"):
        TensorType(shape, torch.float32, MESH.layout())


def test_a_type_asks_for_ranks_of_its_mesh():
    type = TensorType((4,), torch.float32, MESH.layout("dp"))
    for ask in (type.local_shape, type.offset, type.index, type.local_nbytes):
        with pytest.raises(LayoutError, match="rank 4 holds nothing"):
            ask(4)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.uint32])
def test_the_name_of_a_dtype_is_read_back(dtype):
    assert parse_dtype(dtype_name(dtype)) is dtype
    assert parse_dtype(str(dtype)) is dtype
    assert parse_dtype(str(dtype).removeprefix("torch.")) is dtype


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (MESH.layout(), "(dp=R, tp=R)"),
        (MESH.layout("dp", None, "tp"), "(dp=S(0), tp=S(2))"),
        (MESH.layout(("tp", "dp")), "(dp=S(0), tp=S(0)) order 0: tp, dp"),
        (MESH.layout("tp", partial={"dp": "max"}), "(dp=P(max), tp=S(0))"),
        (Layout(MESH, [StridedShard(0, 2), Ragged(1, (3, 5))]), "(dp=S(0, f=2), tp=S(1, [3,5]))"),
        (Layout(Mesh(), []), "()"),
    ],
)
def test_a_layout_prints_as_notation(layout, text):
    assert str(layout) == text


@pytest.mark.parametrize(
    ("layout", "source"),
    [
        (Layout(Mesh(), []), "Layout(Mesh(), ())"),
        (Layout(Mesh(x=2), [S0]), "Layout(Mesh(x=2), (Shard(0),))"),
        (MESH.layout("dp"), "Layout(Mesh(dp=2, tp=2), (Shard(0), Replicate()))"),
        (
            MESH.layout(("tp", "dp")),
            "Layout(Mesh(dp=2, tp=2), (Shard(0), Shard(0)), order={0: ('tp', 'dp')})",
        ),
    ],
)
def test_a_layout_prints_as_its_source(layout, source):
    assert repr(layout) == source


@pytest.mark.parametrize(
    ("shape", "dtype", "layout", "text"),
    [
        ((), torch.float32, MESH.layout(), "f32[]"),
        ((), torch.int64, MESH.layout(partial={"tp": "sum"}), "i64[]{sum:tp}"),
        ((8, 16), torch.float32, MESH.layout("dp", partial={"tp": "sum"}), "f32[8@dp,16]{sum:tp}"),
        ((8, 16), torch.bfloat16, MESH.layout(None, ("tp", "dp")), "bf16[8,16@(tp,dp)]"),
        (
            (8,),
            torch.bool,
            MESH.layout(partial={"tp": "bor", "dp": "bor"}),
            "bool[8]{bor:dp,bor:tp}",
        ),
        (
            (8, 8),
            torch.complex64,
            Layout(MESH, [StridedShard(0, 2), Ragged(1, (3, 5))]),
            "c64[8@dp/2,8@tp:3:5]",
        ),
    ],
)
def test_a_type_prints_as_notation(shape, dtype, layout, text):
    assert str(TensorType(shape, dtype, layout)) == text


def test_a_type_prints_as_its_source():
    type = TensorType((8,), torch.float32, Layout(Mesh(x=2), [P]))
    assert repr(type) == "TensorType((8,), torch.float32, Layout(Mesh(x=2), (Partial('sum'),)))"
