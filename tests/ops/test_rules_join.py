"""Rules of joins, slices, paddings, diagonals and factories: every row holds, nested ones too."""

import itertools

import pytest
import torch

from fdtensor.layouts.blocks import chunk
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Ragged, Replicate, Shard, Spans, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Call, Full
from fdtensor.ops.notation.core import Window, rule_of
from fdtensor.ops.rows import rows_of
from fdtensor.programs.tracer import trace
from fdtensor.runtime.all_ranks import run_lines
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.testing.row_checks import call_of, check_row, verify
from fdtensor.testing.values import gather_full, scatter
from tests.support.decompositions import differences
from tests.support.nested import ints, nested

aten = torch.ops.aten

R, P, S = Replicate(), Partial("sum"), Shard


def joins():
    for shapes, dim in [
        ([(4, 3), (2, 3)], 0),
        ([(4, 3), (4, 3), (4, 1)], -1),
        ([(5,), (0,), (2,)], 0),
        ([(4, 3), (0,), (3, 3)], 0),
        ([(0,), (0,)], 0),
        ([(7, 2)], 0),
    ]:
        yield aten.cat.default, ([ints(*shape) for shape in shapes], dim)
    yield aten.cat.default, ([ints(3, 2), ints(3, 2, dtype=torch.int64)],)
    yield aten.cat.default, ([ints(1, 2), ints(9, 2), ints(2, 2)],)
    yield aten.cat.default, ([ints(2, 7), ints(0), ints(2, 1), ints(2, 2)], 1)
    for shape, dim in [((4, 3), 0), ((5, 2), -1), ((5, 2), 1), ((), 0), ((0, 3), 1)]:
        yield aten.stack.default, ([ints(*shape), ints(*shape)], dim)


def pieces():
    for shape, dim, sizes in [
        ((6, 4), 0, [2, 4]),
        ((7, 3), -2, [1, 0, 6]),
        ((5, 8), 1, [3, 3, 2]),
        ((5,), 0, [5]),
        ((0, 3), 0, [0]),
    ]:
        yield aten.split_with_sizes.default, (ints(*shape), sizes, dim)
    for shape, size, dim in [((6, 4), 2, 0), ((7, 3), 3, -2), ((5, 8), 9, 1), ((0, 3), 2, 0)]:
        yield aten.split.Tensor, (ints(*shape), size, dim)
    yield aten.split.Tensor, (ints(4, 3), 2)
    for shape, dim in [((4, 3), 0), ((2, 5, 3), -1), ((3,), 0), ((1, 4), 0)]:
        yield aten.unbind.int, (ints(*shape), dim)


def orders():
    for shape in [(6, 4), (5, 3, 2), (1, 4), (0, 2)]:
        x = ints(*shape)
        yield aten.flip.default, (x, [0])
        yield aten.flip.default, (x, [0, -1])
        yield aten.flip.default, (x, [])
        yield aten.roll.default, (x, [1], [-1])
        yield aten.roll.default, (x, [1, 2], [0, 1])
        yield aten.roll.default, (x, [-4, 7, 1], [0, 0, -1])
        yield aten.roll.default, (x, [3])
        yield aten.repeat.default, (x, [1] * (x.ndim - 1) + [3])
        yield aten.repeat.default, (x, [2, *[1] * x.ndim])
        yield aten.repeat.default, (x, [5, 3, *[2] * x.ndim])
        yield aten.repeat.default, (x, [0] * x.ndim)
    yield aten.repeat.default, (ints(), [4])
    for shape, dim, size, step in [
        ((6, 4), 0, 2, 2),
        ((7, 3), -2, 3, 1),
        ((5, 8), 1, 8, 1),
        ((11, 2), 0, 2, 3),
        ((9, 2), 0, 5, 2),
    ]:
        x = ints(*shape)
        grad = ints(*x.unfold(dim, size, step).shape)
        yield aten.unfold.default, (x, dim, size, step)
        yield aten.unfold_copy.default, (x, dim, size, step)
        yield aten.unfold_backward.default, (grad, list(shape), dim, size, step)


def slices():
    most = 2**63 - 1
    for shape, dim, start, end, step in [
        ((6, 4), 0, 1, most, 1),
        ((6, 4), 0, 0, most, 1),
        ((6, 4), 0, 0, -1, 1),
        ((7, 3), -2, 2, 6, 2),
        ((8, 2), 0, 1, 8, 3),
        ((5, 3), 0, None, None, 1),
        ((5, 3), 1, 0, most, 1),
        ((9,), 0, 4, 5, 1),
        ((9,), 0, 5, 4, 1),
        ((9,), 0, -20, 20, 5),
        ((0, 2), 0, 0, 3, 1),
        ((1, 2), 0, 0, 1, 1),
    ]:
        x = ints(*shape)
        src = ints(*aten.slice.Tensor(x, dim, start, end, step).shape)
        yield aten.slice.Tensor, (x, dim, start, end, step)
        yield aten.slice_scatter.default, (x, src, dim, start, end, step)
        if start is not None:
            yield aten.slice_backward.default, (src, list(shape), dim, start, end, step)
    yield aten.slice.Tensor, (ints(4, 3),)


def selections():
    for shape, dim, index in [((6, 4), 0, 5), ((7, 3), -2, -7), ((5, 3, 2), 1, 1), ((3,), 0, 0)]:
        x = ints(*shape)
        src = x.select(dim, index).clone()
        yield aten.select.int, (x, dim, index)
        yield aten.select_backward.default, (src, list(shape), dim, index)
        yield aten.unbind.int, (x, dim)
    yield aten.select.int, (ints(4, 3) > 0, 0, 2)


def paddings():
    for shape, pad in [
        ((6, 4), [1, 2]),
        ((6, 4), [0, 0, 1, 2]),
        ((7, 3), [1, -2, -3, 2]),
        ((5, 2), [0, 0, 9, 0]),
        ((5, 2), [0, 0, -5, 1]),
        ((5,), [0, 7]),
        ((4, 3), []),
        ((0, 2), [0, 0, 2, 3]),
        ((8,), [-3, -1]),
    ]:
        for value in (0, 2.5):
            yield aten.constant_pad_nd.default, (ints(*shape), pad, value)


def diagonals():
    for shape in [(6, 4), (4, 6), (3, 5, 5), (1, 1), (2, 0, 3)]:
        x = ints(*shape)
        for offset in (0, 2, -1):
            yield aten.tril.default, (x, offset)
            yield aten.triu.default, (x, offset)
            for dims in [(0, 1), (-1, -2), (0, -1)]:
                line = x.diagonal(offset, *dims)
                yield aten.diagonal.default, (x, offset, *dims)
                yield aten.diagonal_backward.default, (line.clone(), list(shape), offset, *dims)
        if x.ndim == 2:
            yield aten.trace.default, (x,)
            yield aten.trace.default, (x.to(torch.int32),)


def factories():
    x = ints(6, 5)
    for size in ([6, 5], [7], [1, 4], [0, 3], []):
        yield aten.full.default, (size, 3)
        yield aten.zeros.default, ((size,), {"dtype": torch.int64})
        yield aten.ones.default, (size,)
        yield aten.new_zeros.default, (x, size)
        yield aten.new_ones.default, ((x, size), {"dtype": torch.int64})
        yield aten.new_full.default, (x, size, 2.5)
    for like in (aten.zeros_like.default, aten.ones_like.default):
        yield like, (x,)
    yield aten.full_like.default, (x, 4)
    for ends in [(7,), (0,), (2, 9), (9, 2, -2), (0.5, 4), (1, 2, 0.25), (1.0, -4, -0.5), (4.5,)]:
        op = [aten.arange.default, aten.arange.start, aten.arange.start_step][len(ends) - 1]
        yield op, (ends, {})
        yield op, (ends, {"dtype": torch.float64})
        if all(isinstance(n, int) for n in ends):
            yield op, (ends, {"dtype": torch.int32})
    for start, end, steps in [(0, 1, 5), (-2.0, 3, 8), (4, -4, 1), (0, 1, 0), (3, 1, 2)]:
        yield aten.linspace.default, ((start, end, steps), {})
        yield aten.linspace.default, ((start, end, steps), {"dtype": torch.int64})
    for size in ((5,), (4, 7), (7, 2), (0, 3)):
        yield (aten.eye.default if len(size) == 1 else aten.eye.m), (size, {})
        yield (aten.eye.default if len(size) == 1 else aten.eye.m), (size, {"dtype": torch.int64})


FAMILIES = [joins, pieces, orders, slices, selections, paddings, diagonals, factories]


@pytest.mark.one_of("count")
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_every_row_holds_on_blocks(family, count):
    """Blocks that divide evenly, that do not, and empty ones; pending terms are random."""
    samples = list(family())
    assert all(rule_of(op) is not None for op, _ in samples)
    wrong = [w for op, sample in samples for w in verify(op, [sample], count=count)]
    assert not wrong, "\n".join(map(str, wrong[:5]))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_rows_of_two_axes_hold_together(family):
    """The first samples of each op, on a mesh of two axes, for all pairs of rows."""
    samples = [
        (op, sample)
        for op, group in itertools.groupby(
            sorted(family(), key=lambda s: str(s[0])), lambda s: s[0]
        )
        for op, sample in itertools.islice(group, 2)
    ]
    wrong = [found for op, sample in samples for found in nested(op, sample)]
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.parametrize(
    ("op", "sample", "row"),
    [
        (aten.cat.default, ([ints(4, 3), ints(2, 3)], 0), ((P, P), (P,))),
        (aten.cat.default, ([ints(4, 3), ints(0)], 0), ((S(1), R), (S(1),))),
        (aten.slice.Tensor, (ints(6, 4), 0, 1), ((S(0),), (Ragged(0, (2, 3)),))),
        (
            aten.slice_backward.default,
            (ints(5, 4), [6, 4], 0, 1, 6, 1),
            ((Ragged(0, (2, 3)),), (S(0),)),
        ),
        (aten.select.int, (ints(6, 4), 0, 1), ((S(0),), (P,))),
        (aten.constant_pad_nd.default, (ints(6, 4), [0, 0, 2, 0]), ((S(0),), (Ragged(0, (5, 3)),))),
        (aten.tril.default, (ints(6, 4),), ((S(0),), (S(0),))),
        (aten.new_zeros.default, (ints(6, 4), [6, 4]), ((S(0),), (S(0),))),
        (aten.split.Tensor, (ints(6, 4), 3, 0), ((S(0),), (Ragged(0, (3, 0)), Ragged(0, (0, 3))))),
        (aten.trace.default, (ints(4, 4),), ((S(0),), (P,))),
        (aten.cat.default, ([ints(4, 3)] * 2, 0), ((S(0), S(0)), (StridedShard(0, 2),))),
        (aten.split.Tensor, (ints(6, 4), 3, 0), ((StridedShard(0, 2),), (S(0), S(0)))),
        (aten.unbind.int, (ints(2, 4), 0), ((S(0),), (P, P))),
        (aten.diagonal.default, (ints(6, 4), 2), ((S(0),), (Ragged(0, (2, 0)),))),
        (aten.diagonal_backward.default, (ints(4), [6, 4], 0, 0, 1), ((R,), (S(1),))),
        (
            aten.unfold.default,
            (ints(6, 4), 0, 2, 1),
            ((Spans(0, [[(0, 4)], [(3, 6)]]),), (S(0),)),
        ),
        (
            aten.roll.default,
            (ints(6, 4), [1], [0]),
            ((Spans(0, [[(0, 2), (5, 6)], [(2, 5)]]),), (S(0),)),
        ),
    ],
    ids=lambda v: str(v) if isinstance(v, torch._ops.OpOverload) else "",
)
def test_a_rule_has_the_row_that_a_model_needs(op, sample, row):
    call, tensors, whole = call_of(op, sample, {})
    types = [Full(tuple(t.shape), t.dtype) for t in (*tensors, *whole)]
    assert row in [(r.ins, r.outs) for r in rows_of(call, types, 2)]


def test_a_piece_that_nobody_reads_takes_no_placement():
    x = ints(6, 4)
    call, _, _ = call_of(aten.split.Tensor, (x, 3, 0), {})
    call = Call(call.op, call.args, call.kwargs, (call.outs[0], None))
    types = [Full((6, 4), x.dtype), Full((3, 4), x.dtype)]
    assert ((S(1),), (S(1), R)) in [(r.ins, r.outs) for r in rows_of(call, types, 2)]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.empty.memory_format, ([7, 3],)),
        (aten.empty_strided.default, ([7, 3], [1, 7])),
        (aten.empty_like.default, (ints(7, 3),)),
        (aten.new_empty.default, (ints(6, 5), [7, 3])),
        (aten.new_empty_strided.default, (ints(7, 3), [7, 3], [1, 7])),
    ],
    ids=str,
)
def test_a_block_of_anything_has_the_shape_of_a_block(op, args):
    call, tensors, whole = call_of(op, args, {})
    types = [Full(tuple(t.shape), t.dtype) for t in (*tensors, *whole)]
    rows = rows_of(call, types, 4)
    assert len(rows) > 2
    for row in rows:
        found = check_row(call, row, tensors, whole, 4)
        assert found is None or found.startswith("output 0: "), (str(row), found)


@pytest.mark.parametrize("size", [0, 3, 7, 8])
@pytest.mark.parametrize("chosen", [(0, 8, 1), (2, 7, 1), (1, 7, 3), (-2, 8, 1), (1, 1, 1)])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_a_window_leaves_each_position_where_it_was(size, chosen, count):
    placed = Window(0, size, *chosen).of(len(range(*chosen)), count)
    chosen = range(*chosen)
    ends = [chunk(size, count, i)[1] for i in range(count - 1)]
    owners = [sum(i >= end for end in ends) for i in chosen]
    sizes = tuple(owners.count(rank) for rank in range(count))
    plain = [r for r in range(count) for _ in range(*chunk(len(chosen), count, r))]
    stay = all(a == b for i, a, b in zip(chosen, owners, plain) if i < size)
    assert placed == (S(0) if stay or owners == plain else Ragged(0, sizes))


def decomposed():
    x, line = ints(6, 4), ints(24)
    yield aten.roll.default, (x, [5])
    yield aten.roll.default, (x, [-30])
    yield aten.resize.default, (x, [3, 5])
    yield aten.resize_as.default, (x, ints(2, 7))
    for op in (aten.as_strided.default, aten.as_strided_copy.default):
        yield op, (x, [4, 6], [1, 4])
        yield op, (x, [3, 2], [2, 2], 1)
        yield op, (x, [], [], 5)
        yield op, (x, [1, 2, 3], [5, 0, 1])
        yield op, (x, [0, 2], [1, 1])
        yield op, (line, [5, 8], [3, 1])
    yield aten.as_strided_scatter.default, (x, ints(3, 2), [3, 2], [4, 2], 1)
    yield aten.as_strided_scatter.default, (x, ints(), [], [], 5)
    yield aten.block_diag.default, ([x, ints(3), ints()],)
    yield aten._chunk_cat.default, ([x, ints(6, 3)], 0, 4)
    yield aten._chunk_cat.default, ([x, ints(6, 3), ints(6, 1)], -1, 2)
    yield aten.select_scatter.default, (x, ints(6), 1, -2)
    for offset in (0, 2, -1):
        yield aten.diag_embed.default, (x, offset)
        yield aten.diag_embed.default, (x, offset, 2, 0)
        yield aten.diagonal_scatter.default, (x, x.diagonal(offset) + 1, offset)
        yield aten.diagonal_scatter.default, (x, x.diagonal(offset, 1, 0) + 1, offset, 1, 0)


@pytest.mark.parametrize(("op", "sample"), list(decomposed()), ids=str)
def test_a_decomposition_gives_what_the_op_gives(op, sample):
    assert differences(op, [sample]) == []


TRAFFIC = [
    (lambda x: x.flip(0), 2 * 3),
    (lambda x: x.roll(1, 0), 3),
    (lambda x: x.roll(-2, 0), 2 * 3),
    (lambda x: x.repeat(3, 2), 0),
    (lambda x: torch.cat([x, -x]), 0),
    (lambda x: torch.cat([x, -x]).chunk(2)[1], 0),
    (lambda x: x.unfold(0, 3, 1), 2 * 3),
    (lambda x: x.unfold(0, 2, 2), 0),
    (lambda x: x[1:] - x[:-1], 3),
    (lambda x: x.diagonal(-3), 0),
    (lambda x: x.diagonal().diag_embed(), 1),
    (lambda x: x.diagonal_scatter(torch.ones(3)), 0),
    (lambda x: x.select_scatter(torch.ones(3), 0, 5), 0),
    (lambda x: torch.block_diag(x, x), 0),
    (lambda x: x.as_strided([8, 2], [3, 1]), 0),
    (lambda x: torch.as_strided_copy(x, [6, 3, 3], [3, 3, 1]), 2 * 3),
    (lambda x: x.repeat_interleave(2, 0), 0),
    (lambda x: aten.unfold_backward(x, [10], 0, 3, 1), 3 * 3),
]
X = ints(8, 3)


@pytest.mark.parametrize(("f", "elements"), TRAFFIC)
def test_only_what_other_ranks_need_moves(f, elements):
    """On rows over 4 ranks; the number of elements that the busiest rank receives."""
    type = TensorType((8, 3), torch.float32, Layout(Mesh(x=4), [S(0)]))
    program = trace(f, type)
    assert program.received_bytes == 4 * elements, str(program)
    (made,) = run_lines(program, [scatter(X, type, 0)], SimulatedComm(program.mesh))
    assert torch.equal(gather_full(made, program.out_types[0]), f(X)), str(program)
