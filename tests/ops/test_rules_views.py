"""Every row of every rule for views and products of matrices; reshapes by brute force."""

import itertools
import random
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdtensor.layouts.blocks import chunk
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Shard, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import P, R, S
from fdtensor.ops.notation.reshape import groups
from fdtensor.ops.rows import rows_of
from fdtensor.ops.rules import Row
from fdtensor.ops.same_elements import same_elements
from fdtensor.testing.row_checks import call_of, verify
from fdtensor.testing.strategies import types

aten = torch.ops.aten
COUNTS = [2, 3, 4]
pytestmark = pytest.mark.one_of("count")


def ints(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small random integers, so that sums of them are exact."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def types_of(op, *args):
    call, tensors, whole = call_of(op, args, {})
    return call, [Full(tuple(t.shape), t.dtype) for t in (*tensors, *whole)]


def factored(total: int, chance: random.Random) -> list[int]:
    """A shape of `total` elements, with dims of size 1 here and there."""
    shape = []
    while total > 1:
        n = chance.choice([k for k in range(2, total + 1) if total % k == 0])
        shape.append(n)
        total //= n
    chance.shuffle(shape)
    for _ in range(chance.randrange(3)):
        shape.insert(chance.randrange(len(shape) + 1), 1)
    return shape


def reshapes(seed: int, many: int):
    """Random pairs of shapes with the same number of elements."""
    chance = random.Random(seed)
    for _ in range(many):
        total = chance.choice([1, 2, 4, 6, 7, 8, 12, 16, 18, 20, 24, 30, 36])
        yield factored(total, chance), factored(total, chance)


def plain(shape: list[int], size: list[int], count: int) -> set[tuple[int, int]]:
    """The dims, before and after, whose blocks hold the same elements on every rank."""
    x = torch.arange(prod(shape))
    before, after = x.reshape(shape), x.reshape(size)

    def held(t: torch.Tensor, d: int) -> list[list[int]]:
        ends = [chunk(t.shape[d], count, r) for r in range(count)]
        return [t.narrow(d, a, b - a).flatten().tolist() for a, b in ends]

    pairs = itertools.product(range(len(shape)), range(len(size)))
    return {(i, j) for i, j in pairs if held(before, i) == held(after, j)}


@pytest.mark.parametrize("count", COUNTS)
def test_the_rows_of_random_reshapes_are_right(count):
    """Merged and split dims, several at once, and dims of size 1."""
    for shape, size in reshapes(count, 40):
        assert verify(aten.view.default, [(ints(*shape), size)], count=count) == []


@pytest.mark.parametrize("count", COUNTS)
def test_no_plain_row_of_a_reshape_is_missing(count):
    """But those of dims that leave all ranks but the first empty."""
    for shape, size in reshapes(10 + count, 300):
        call, types = types_of(aten.view.default, ints(*shape), size)
        rows = {
            (row.ins[0].dim, row.outs[0].dim)
            for row in rows_of(call, types, count)
            if isinstance(row.ins[0], Shard) and isinstance(row.outs[0], Shard)
        }
        wide = {(i, j) for i, j in plain(shape, size, count) if 1 not in (shape[i], size[j])}
        assert rows >= wide, (shape, size)


def test_groups_hold_the_same_number_of_elements():
    """And are the shortest that do."""
    assert list(groups([2, 1, 6, 5], [12, 1, 5])) == [([0, 2], [0]), ([3], [2])]
    assert list(groups([4, 6], [2, 2, 6])) == [([0], [0, 1]), ([1], [2])]
    assert list(groups([6, 2], [4, 3])) == [([0, 1], [0, 1])]
    assert list(groups([1, 1], [])) == []


SAMPLES = [
    (aten.view.default, ints(4, 6), [-1]),
    (aten.view.default, ints(4, 6), [2, -1, 3]),
    (aten.view.default, ints(0, 6), [0, 2, 3]),
    (aten.view.default, ints(1), []),
    (aten._unsafe_view.default, ints(6, 2, 5), [12, 5]),
    (aten.view_copy.default, ints(5, 6), [5, 3, 2]),
    (aten._reshape_copy.default, ints(5, 6), [30]),
    (aten._reshape_alias.default, ints(8, 3), [2, 4, 3], [12, 3, 1]),
    (aten.reshape.default, ints(8, 3), [24]),
    (aten.t.default, ints(5, 3)),
    (aten.t.default, ints(5)),
    (aten.transpose.int, ints(5, 3, 2), 0, -1),
    (aten.transpose.int, ints(5, 1), 0, 1),
    (aten.permute.default, ints(5, 3, 2), [-1, 0, 1]),
    (aten.permute.default, torch.tensor(1.0), []),
    (aten.unsqueeze.default, ints(5, 3), 1),
    (aten.unsqueeze.default, ints(5, 3), -1),
    (aten.squeeze.default, ints(1, 5, 1)),
    (aten.squeeze.dim, ints(1, 5, 1), -1),
    (aten.squeeze.dim, ints(1, 5, 1), 1),
    (aten.squeeze.dims, ints(1, 5, 1, 3), [0, 2]),
    (aten.expand.default, ints(5, 1), [2, 5, 3]),
    (aten.expand.default, ints(5, 1), [-1, 4]),
    (aten.expand.default, torch.tensor(2.0), [3]),
    (aten.expand_copy.default, ints(1, 1), [1, 4]),
    (aten.view_as_real.default, torch.complex(ints(5, 3), ints(5, 3))),
    (aten.view_as_complex.default, ints(5, 3, 2)),
    (aten.view.dtype, ints(5, 3), torch.int32),
    (aten.view.dtype, ints(5, 6), torch.float64),
    (aten.view.dtype, ints(5, 3).double(), torch.int32),
    (aten.view.dtype, ints(5, 3), torch.uint8),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: f"{s[0]}{[*s[1].shape]}{s[2:]}")
@pytest.mark.parametrize("count", COUNTS)
def test_the_rows_of_views_are_right(sample, count):
    """Negative dims, dims of size 1 and new ones."""
    op, *args = sample
    assert verify(op, [tuple(args)], count=count) == []


RESHAPES = [((6, 4), (8, 3)), ((6, 4), (24,)), ((2, 3, 4), (6, 4)), ((24,), (2, 3, 4))]


@given(st.sampled_from(RESHAPES), st.sampled_from([Mesh(x=2), Mesh(x=2, y=2)]), st.data())
def test_blocks_are_the_same_after_a_reshape_where_their_elements_are(shapes, mesh, data):
    src, dst = (data.draw(types(mesh, shape, partial=False)) for shape in shapes)

    def held(type, rank):
        places = torch.arange(24).reshape(type.shape)
        for d, index in enumerate(type.index(rank)):
            places = places.index_select(d, torch.tensor(tuple(index), dtype=torch.int64))
        return places.flatten().tolist()

    same = all(held(src, r) == held(dst, r) for r in mesh.ranks)
    if all(held(src, r) for r in mesh.ranks):
        assert same_elements(src, dst) == same
    else:  # of empty blocks nothing else need agree
        assert same or not same_elements(src, dst)


def test_blocks_of_the_largest_tensors_are_compared_by_their_ranges():
    mesh = Mesh(x=2, y=4)
    rows = TensorType((2**30, 2**30), torch.bool, mesh.layout("x", "y"))
    flat = TensorType((2**60,), torch.bool, mesh.layout(("x", "y")))
    both = TensorType((2**30, 2**30), torch.bool, mesh.layout(("x", "y")))
    columns = Layout(mesh, [Shard(0), StridedShard(0, 2**20)])
    assert same_elements(both, flat)
    assert not same_elements(rows, flat)
    assert not same_elements(TensorType((2**30, 2**30), torch.bool, columns), flat)


def test_bits_of_a_pending_sum_say_nothing():
    """A view as another dtype has no pending row."""
    call, types = types_of(aten.view.dtype, ints(4), torch.int32)
    assert all(not isinstance(p, Partial) for row in rows_of(call, types, 2) for p in row.ins)


def test_a_wrong_row_of_a_reshape_is_found():
    """The last of the dims that are merged is no contiguous block."""
    row = Row((S(1),), (S(0),))
    (wrong,) = verify(aten.view.default, [(ints(4, 6), [24])], [row], count=2)
    assert wrong.row is row


PRODUCTS = [
    (aten.mm.default, "ik", "kj"),
    (aten.bmm.default, "nik", "nkj"),
    (aten.mv.default, "ik", "k"),
    (aten.dot.default, "k", "k"),
    (aten.vdot.default, "k", "k"),
    (aten.outer.default, "i", "j"),
    (aten.addmm.default, "ij", "ik", "kj"),
    (aten.addmm.default, "j", "ik", "kj"),
    (aten.addmm.default, "i1", "ik", "kj"),
    (aten.addmm.default, "", "ik", "kj"),
    (aten._addmm_activation.default, "j", "ik", "kj"),
    (aten.baddbmm.default, "nij", "nik", "nkj"),
    (aten.baddbmm.default, "1j", "nik", "nkj"),
    (aten.addbmm.default, "ij", "nik", "nkj"),
    (aten.addbmm.default, "1j", "nik", "nkj"),
    (aten.addmv.default, "i", "ik", "k"),
    (aten.addmv.default, "1", "ik", "k"),
    (aten.addr.default, "ij", "i", "j"),
    (aten.addr.default, "j", "i", "j"),
    (aten.linear.default, "nik", "jk", "j"),
    (aten.linear.default, "ik", "jk"),
    (aten.linear.default, "k", "jk"),
    (aten.linear.default, "ik", "k"),
    (aten.matmul.default, "ik", "kj"),
    (aten.matmul.default, "k", "kj"),
    (aten.matmul.default, "ik", "k"),
    (aten.matmul.default, "k", "k"),
    (aten.matmul.default, "mnik", "nkj"),
    (aten.matmul.default, "ik", "nkj"),
    (aten.matmul.default, "1nik", "m1kj"),
    (aten.matmul.default, "k", "nkj"),
    (aten.matmul.default, "nik", "k"),
]
SIZES = [
    {"i": 4, "j": 6, "k": 8, "n": 2, "m": 3},
    {"i": 5, "j": 1, "k": 3, "n": 3, "m": 2},
    {"i": 1, "j": 2, "k": 1, "n": 5, "m": 1},
]


@pytest.mark.parametrize(("op", "indices"), [(op, rest) for op, *rest in PRODUCTS], ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_the_rows_of_products_are_right(op, indices, count):
    """A cut of an index of the sum leaves a sum pending, and the bias is added once."""
    for sizes in SIZES:
        shapes = [[{"1": 1, **sizes}[letter] for letter in index] for index in indices]
        args = tuple(ints(*shape, seed=i) for i, shape in enumerate(shapes))
        assert verify(op, [args], count=count) == []
        if str(op).startswith(("aten.add", "aten.badd")):
            assert verify(op, [(args, {"beta": 2, "alpha": 3})], count=count) == []


@pytest.mark.parametrize("count", COUNTS)
def test_the_rows_of_products_of_three_are_right(count):
    """`out[n, o] = sum_{i, j} a[n, i] * w[o, i, j] * b[n, j]`"""
    args = (ints(3, 4), ints(2, 4, 5, seed=1), ints(3, 5, seed=2), [1, 3], [0], [1, 2], [2, 3])
    assert verify(aten._trilinear.default, [args], count=count) == []


def test_complex_products_conjugate_pending_terms():
    """`vdot` conjugates its first argument."""
    a, b = (torch.complex(ints(5, seed=i), ints(5, seed=i + 1)) for i in (0, 2))
    assert verify(aten.vdot.default, [(a, b)], count=3) == []
    assert verify(aten.dot.default, [(a, b)], count=3) == []


def test_a_bias_is_added_once():
    """With a cut of the sum's index, the bias has to be pending."""
    call, types = types_of(aten.addmm.default, ints(6), ints(4, 8), ints(8, 6))
    rows = [(row.ins, row.outs) for row in rows_of(call, types, 2)]
    assert ((P, S(1), S(0)), (P,)) in rows
    assert ((R, S(1), S(0)), (P,)) not in rows


def test_a_dim_amid_others_may_be_cut():
    call, types = types_of(aten.view.default, ints(2, 24), [2, 3, 2, 4])
    rows = {(row.ins[0], row.outs[0]) for row in rows_of(call, types, 2)}
    assert (StridedShard(1, 3), Shard(2)) in rows  # the heads of queries, keys and values
    call, types = types_of(aten.view.default, ints(5, 6, 8), [5 * 6 * 2, 4])
    assert (Shard(2), StridedShard(0, 30)) in {
        (row.ins[0], row.outs[0]) for row in rows_of(call, types, 2)
    }
    assert not verify(aten.view.default, [(ints(5, 6, 8), [60, 4])], count=2)
