"""Rules of look-ups, gathers, scatters and writes at indices: every row holds, nested ones too."""

import contextlib

import pytest
import torch

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Replicate, Shard, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.decompositions import DECOMPOSITIONS
from fdtensor.ops.graph import Full
from fdtensor.ops.lowering import local_graph, lowered
from fdtensor.ops.notation.core import rule_of
from fdtensor.ops.rows import rows_of
from fdtensor.programs.tracer import trace
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.spmd import spmd
from fdtensor.testing.row_checks import call_of, verify
from fdtensor.testing.values import gather_full, scatter
from tests.operators.check import BYTES
from tests.support.decompositions import differences
from tests.support.nested import ints, nested

aten = torch.ops.aten


def below(size, *shape, least=0):
    """Indices of a dim."""
    return ints(*shape, least=least, most=size - 1, dtype=torch.int64)


def distinct(size, *shape, dim):
    """Indices that differ along `dim`: what is written twice has no defined value."""
    generator = torch.Generator().manual_seed(size)
    order = torch.rand(*shape[:dim], size, *shape[dim + 1 :], generator=generator).argsort(dim)
    return order.narrow(dim, 0, shape[dim]).contiguous()


def embeddings():
    for rows, width, shape in [
        (8, 4, (5,)),
        (7, 3, (2, 3)),
        (5, 1, ()),
        (3, 2, (4, 0)),
        (1, 2, (3,)),
    ]:
        index = below(rows, *shape)
        grad = ints(*shape, width)
        yield aten.embedding.default, (ints(rows, width), index)
        for padding, scale in [(-1, False), (0, False), (rows - 1, True), (-1, True)]:
            yield aten.embedding.default, (ints(rows, width), index, padding, scale)
            yield aten.embedding_dense_backward.default, (grad, index, rows, padding, scale)
        for most, norm in [(2.0, 2.0), (4.0, 1.0)]:
            yield aten.embedding_renorm.default, (ints(rows, width), index, most, norm)


def bags():
    weight, index, offsets = ints(6, 5), below(6, 7), torch.tensor([0, 3, 3])
    weights = ints(7)
    for mode in (0, 1, 2):
        for given in (None, weights) if mode == 0 else (None,):
            args = (weight, index, offsets, False, mode, False, given)
            yield aten._embedding_bag_forward_only.default, args
            yield aten._embedding_bag.default, args
            out, bag, size, largest = aten._embedding_bag.default(*args)
            grad = ints(*out.shape)
            rest = (6, False, mode)
            before = (grad, index, offsets, bag, size, largest)
            yield aten._embedding_bag_backward.default, (*before, *rest, False, given)
            bag, size = torch.tensor([0, 0, 0, 2, 2, 2, 2]), torch.tensor([3, 0, 4])
            args = (grad, index, bag, size, largest, *rest, given)
            yield aten._embedding_bag_dense_backward.default, args


def gathers():
    for shape, dim, index in [
        ((6, 4), 0, (6, 4)),
        ((6, 4), -1, (6, 4)),
        ((7, 5), 0, (3, 5)),
        ((7, 5), 1, (4, 9)),
        ((5, 3, 2), 1, (4, 6, 2)),
        ((3, 1), 1, (3, 2)),
        ((4, 2), 0, (0, 2)),
        ((2,), 0, (5,)),
        ((), 0, ()),
        ((4,), 0, (4,)),
    ]:
        size = shape[dim] if shape else 1
        yield aten.gather.default, (ints(*shape), dim, below(size, *index))
    mask = ints(5, 3) > 0
    yield aten.gather.default, (mask, 0, below(5, 4, 3))


def scatters():
    for shape, dim, of, more in [
        ((6, 4), 0, (6, 4), 0),
        ((6, 4), 1, (6, 3), 0),
        ((7, 5), 0, (3, 4), 0),
        ((7, 5), 0, (3, 4), 1),
        ((7, 5), -1, (7, 2), 2),
        ((5, 3, 2), 1, (4, 2, 2), 0),
        ((3, 1), 0, (2, 1), 0),
        ((4, 2), 0, (0, 2), 0),
        ((2,), 0, (2,), 0),
        ((), 0, (), 0),
    ]:
        x, src = ints(*shape), ints(*(n + more for n in of))
        size = shape[dim] if shape else 1
        once = distinct(size, *of, dim=dim % len(shape)) if shape else torch.tensor(0)
        often = below(size, *of)
        yield aten.scatter.src, (x, dim, once, src)
        yield aten.scatter.value, (x, dim, often, 0)
        yield aten.scatter.value, (x, dim, often, 3)
        yield aten.scatter_add.default, (x, dim, often, src)
        if len(shape) != 2:
            continue
        for reduce in ("add", "multiply"):
            yield aten.scatter.reduce, ((x, dim, often, src), {"reduce": reduce})
            yield aten.scatter.value_reduce, ((x, dim, often, 2), {"reduce": reduce})
        for reduce in ("sum", "mean", "prod", "amax", "amin"):
            for own in (True, False):
                sample = (x, dim, often, src, reduce), {"include_self": own}
                yield aten.scatter_reduce.two, sample


def slices():
    for shape, dim, count in [
        ((6, 4), 0, 5),
        ((7, 3), 1, 2),
        ((5,), 0, 5),
        ((4, 1), -1, 1),
        ((3, 2), 0, 0),
    ]:
        x = ints(*shape)
        size = shape[dim]
        often, once = below(size, count), torch.randperm(size)[:count]
        of = list(shape)
        of[dim] = count
        source = ints(*of)
        yield aten.index_select.default, (x, dim, often)
        yield aten.index_add.default, (x, dim, often, source)
        yield aten.index_add.default, ((x, dim, often, source), {"alpha": 2})
        yield aten.index_copy.default, (x, dim, once, source)
        yield aten.index_fill.int_Scalar, (x, dim, often, 0)
        yield aten.index_fill.int_Scalar, (x, dim, often, 3)
        yield aten.index_fill.int_Tensor, (x, dim, often, torch.tensor(4.0))
        for reduce in ("prod", "mean", "amax", "amin"):
            yield aten.index_reduce.default, (x, dim, often, source, reduce)
        own = {"include_self": False}
        yield aten.index_reduce.default, ((x, dim, often, source, "amax"), own)
    yield aten.index_select.default, (ints(6, 2), 0, torch.tensor(4))
    yield aten.index_select.default, (torch.tensor(2.0), 0, torch.tensor([0]))


def indexings():
    i, j = below(7, 5, least=-7), below(4, 2, 5, least=-4)
    for shape, indices in [
        ((7, 4), [i]),
        ((7, 4), [None, below(4, 6, least=-4)]),
        ((7, 4), [i, j]),
        ((7, 3, 4), [i, None, j]),
        ((3, 7, 4, 2), [None, i, j]),
        ((2, 7, 3, 4), [None, i, None, j]),
        ((3, 7, 2), [None, torch.tensor(-2)]),
        ((7, 2), [below(7, 3, 1), None]),
        ((1, 4), [below(1, 3)]),
        ((7, 4), [below(7, 0)]),
        ((5, 3), [below(5, 1), below(3, 4)]),
    ]:
        x = ints(*shape)
        out = aten.index.Tensor(x, indices)
        yield aten.index.Tensor, (x, indices)
        yield aten._unsafe_index.Tensor, (x, indices)
        for accumulate in (True, False):
            yield aten.index_put.default, (x, indices, torch.tensor(3.0), accumulate)
            if accumulate:
                yield aten.index_put.default, (x, indices, ints(*out.shape), True)
                wide = ints(*(1 if d == 0 else n for d, n in enumerate(out.shape)))
                yield aten.index_put.default, (x, indices, wide, True)
    once = [torch.tensor([-1, 2, 0])]
    for values in (ints(3, 4), ints(4), ints(3, 1)):
        yield aten.index_put.default, (ints(7, 4), once, values)
    yield aten.index_put.default, (ints(5, 4, 3), [None, once[0]], ints(5, 3, 3))
    yield aten.take.default, (ints(4, 3), below(12, 5, least=-12))
    yield aten.take.default, (ints(6), below(6, 2, 3, least=-6))
    yield aten.take.default, (ints(), torch.tensor([0, -1, 0]))
    for index, source in [
        (torch.tensor([-1, 2, 0, 7, 5]), ints(5)),
        (torch.tensor([[-1, 2], [0, 7]]), ints(4)),
    ]:
        yield aten.put.default, (ints(4, 3), index, source)
        yield aten.put.default, (ints(4, 3), index, source, True)
    yield aten.put.default, (ints(4, 3), torch.tensor([-1, 2, 11]), ints(3), True)
    yield aten.put.default, (ints(), torch.tensor([0]), ints(1), True)


def masks():
    for shape, of in [((5, 4), (5, 4)), ((5, 4), (4,)), ((3, 1, 6), (3, 2, 1)), ((7,), (7,))]:
        mask = ints(*of) > 0
        whole = torch.broadcast_shapes(shape, of)
        count = int(mask.expand(whole).sum())
        yield aten.masked_scatter.default, (ints(*shape), mask, ints(count + 2))
        grad = ints(*whole)
        yield aten.masked_scatter_backward.default, (grad, mask, [count + 2])
        for size in (2, count, count + 3):
            yield aten.nonzero_static.default, ((ints(*shape) * mask,), {"size": size})
    for before, of, after in [((), (5,), (3,)), ((2,), (4, 3), ()), ((3,), (5,), (2,))]:
        mask = ints(*of) > 0
        count = int(mask.sum())
        x = ints(*before, *of, *after)
        for values in ((count, *after), (*before, count, *after), (1, *after), ()):
            for accumulate in (False, True):
                where = [*[None] * len(before), mask]
                yield aten.index_put.default, (x, where, ints(*values), accumulate)
    i, j = below(5, 3, 4), below(4, 4)
    mask = ints(3, 4) > 0
    yield aten._unsafe_masked_index.default, (ints(5, 4), mask, [i, j], 0)
    yield aten._unsafe_masked_index.default, (ints(5, 4), mask, [i, j], 2)
    args = ints(5, 4), mask, [i, j], ints(3, 4)
    yield aten._unsafe_masked_index_put_accumulate.default, args
    far = below(9, 4, 1, least=-5), below(9, 3, least=-5)  # those beyond the dims are masked
    for shape, indices, of in [
        ((5, 5), [*far], (4, 3)),
        ((5, 5), [*far], (3,)),
        ((2, 5, 5), [None, *far], (2, 4, 3)),
        ((2, 5, 5), [None, *far], (4, 1)),
        ((5, 2, 5), [far[0], None, far[1]], (4, 3, 2)),
        ((5, 1, 3), [far[0][:, 0]], (4, 1, 3)),
    ]:
        x, mask = ints(*shape), ints(*of) > 0
        zeros = [None if i is None else torch.zeros_like(i) for i in indices]
        values = ints(*aten.index.Tensor(x, zeros).shape)
        for fill in (0, 2.5):
            yield aten._unsafe_masked_index.default, (x, mask, indices, fill)
        args = x, mask, indices, values
        yield aten._unsafe_masked_index_put_accumulate.default, args


def searches():
    lines = torch.tensor([-4.0, -1, -1, 0, 2, 2, 5])
    many = ints(3, 5).sort(1).values
    for right in (False, True):
        for x in (ints(5, 3), ints(), ints(0)):
            yield aten.searchsorted.Tensor, ((lines, x), {"right": right})
            yield aten.bucketize.Tensor, ((x, lines), {"right": right, "out_int32": True})
        yield aten.searchsorted.Tensor, ((many, ints(3, 4)), {"right": right})
        yield aten.searchsorted.Scalar, ((lines, 1), {"right": right})
    mixed = lines.flip(0).contiguous()
    yield aten.searchsorted.Tensor, ((mixed, ints(4)), {"sorter": mixed.argsort()})
    order = torch.arange(5).expand(3, 5).contiguous()
    yield aten.searchsorted.Tensor, ((many, ints(3, 4)), {"sorter": order})
    for invert in (False, True):
        yield aten.isin.Tensor_Tensor, ((ints(5, 3), ints(2, 3)), {"invert": invert})
    repeats = torch.tensor([2, 0, 3, 1, 0])
    yield aten.repeat_interleave.Tensor, ((repeats,), {"output_size": 6})


def counts():
    x, weight = ints(6, 3), ints(6, 3, least=0)
    yield aten.histc.default, (x, 4)
    yield aten.histc.default, (x, 4, -3, 3)
    yield aten.histc.default, (torch.full((5,), 2.0), 3)
    many, along = ints(5, 4, 2), [torch.tensor([-5.0, 0, 2]), torch.tensor([-4.0, -1, 3, 5])]
    for density in (False, True):
        for given in (None, weight):
            more = {"weight": given, "density": density}
            yield aten.histogram.bin_ct, ((x, 4), more)
            yield aten.histogram.bin_ct, ((x, 4), {"range": [-3.0, 4.0], **more})
            yield aten.histogram.bins_tensor, ((x, torch.tensor([-5.0, -1, 0, 6])), more)
            more = {"weight": None if given is None else ints(5, 4, least=0), "density": density}
            yield aten._histogramdd_from_bin_cts.default, ((many, [3, 2]), more)
            some = {"range": [-3.0, 4, -2, 5], **more}
            yield aten._histogramdd_from_bin_cts.default, ((many, [3, 2]), some)
            yield aten._histogramdd_from_bin_tensors.default, ((many, along), more)
        yield aten._histogramdd_bin_edges.default, ((many, [3, 2]), {"density": density})


def segments():
    for shape, lengths in [
        ((7,), torch.tensor([3, 0, 3])),  # the last element is in none
        ((6, 3), torch.tensor([1, 5])),
        ((2, 5, 3), torch.tensor([[2, 3, 0], [1, 0, 4]])),
    ]:
        x, axis = ints(*shape), lengths.ndim - 1
        ends = torch.nn.functional.pad(lengths.cumsum(-1), (1, 0))
        for reduce in ("sum", "mean", "max", "min", "prod"):
            if reduce == "prod":
                x = torch.where(x == 0, 2.0, x)
            for given in ({"lengths": lengths}, {"offsets": ends}):
                for initial in (None,) if reduce == "mean" else (None, 1):
                    more = {**given, "axis": axis, "unsafe": True, "initial": initial}
                    yield aten.segment_reduce.default, ((x, reduce), more)
                out = aten.segment_reduce.default(x, reduce, **given, axis=axis, unsafe=True)
                args = ints(*out.shape), out, x, reduce
                yield aten._segment_reduce_backward.default, (args, {**given, "axis": axis})


def margins():
    x, target, weight = ints(6, 4), below(4, 6), ints(4, least=1)
    several = torch.tensor([[0, 2, -1, 1], [3, -1, 0, 0], [-1, 1, 1, 1]] * 2)
    for reduction in (0, 1, 2):
        grad = ints(6) if reduction == 0 else torch.tensor(2.0)
        for given in (None, weight):
            args = x, target, 1, 1.0, given, reduction
            yield aten.multi_margin_loss.default, args
            yield aten.multi_margin_loss_backward.default, (grad, *args)
        _, hit = aten.multilabel_margin_loss_forward.default(x, several, reduction)
        yield aten.multilabel_margin_loss_forward.default, (x, several, reduction)
        args = grad, x, several, reduction, hit
        yield aten.multilabel_margin_loss_backward.default, args
    yield aten.multi_margin_loss.default, (ints(4), torch.tensor(2), 1, 1.0, None, 1)
    logs, targets = ints(6, 5, 4).log_softmax(2), below(4, 5, 3, least=1)
    for zeros in (False, True):
        args = logs, targets, torch.tensor([6, 5, 6, 6, 4]), torch.tensor([1, 2, 0, 3, 2])
        yield torch.ops.fdtensor.ctc_loss.default, (*args, 0, zeros)
        made = torch.ops.fdtensor.ctc_loss.default(*args, 0, zeros)
        yield torch.ops.fdtensor.ctc_loss_backward.default, (ints(5), *args, *made, 0, zeros)


FAMILIES = [
    *(embeddings, bags, gathers, scatters, slices, indexings, masks),
    *(searches, counts, segments, margins),
]
APART = {
    *(aten._histogramdd_from_bin_cts.default, aten._histogramdd_bin_edges.default),
    *(aten.histogram.bin_ct, aten.nonzero_static.default, aten.repeat_interleave.Tensor),
}
"""Ops that have no rows, only pieces that do."""


@pytest.mark.one_of("count")
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_every_row_holds_on_blocks(family, count):
    """Blocks that divide evenly, that do not, and empty ones; pending terms are random."""
    samples = [(op, sample) for op, sample in family() if op not in APART]
    assert all(rule_of(op) is not None for op, _ in samples)
    wrong = [w for op, sample in samples for w in verify(op, [sample], count=count)]
    assert not wrong, "\n".join(map(str, wrong[:5]))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f is not bags])
def test_rows_of_two_axes_hold_together(family):
    """Each op's last sample of two dims, on a mesh of two axes, for all pairs of rows."""
    last = {}
    for op, sample in family():
        if op not in last or len(last) % 2:
            last[op] = sample
    wrong = [found for op, sample in last.items() for found in nested(op, sample)]
    assert not wrong, "\n".join(wrong[:5])


def test_decompositions_give_what_their_ops_give():
    """Where they take the arguments; each op takes some."""
    wrong, checked, due = [], set(), set()
    for op, sample in (given for family in FAMILIES for given in family()):
        if op in DECOMPOSITIONS:
            due.add(op)
            with contextlib.suppress(NotImplementedError):
                wrong += differences(op, [sample])
                checked.add(op)
    assert not wrong, "\n".join(wrong[:5])
    assert checked == due


R, P, S = Replicate(), Partial("sum"), Shard


@pytest.mark.parametrize(
    ("op", "sample", "row"),
    [
        (aten.embedding.default, (ints(8, 4), below(8, 5)), ((S(0), R), (P,))),
        (
            aten.embedding_dense_backward.default,
            (ints(5, 4), below(8, 5), 8, -1, False),
            ((R, R), (S(0),)),
        ),
        (aten.gather.default, (ints(6, 4), 1, below(4, 6, 1)), ((S(1), R), (P,))),
        (
            aten.scatter_add.default,
            (ints(6, 4), 1, below(4, 6, 4), ints(6, 4)),
            ((S(1), R, R), (S(1),)),
        ),
        (aten.index.Tensor, (ints(6, 4), [None, below(4, 3)]), ((S(1), R), (P,))),
        (
            aten.index_put.default,
            (ints(6, 4), [below(6, 3)], ints(3, 4), True),
            ((P, S(0), S(0)), (P,)),
        ),
        (
            aten.scatter_reduce.two,
            (ints(6, 4), 0, below(6, 4, 4), ints(4, 4), "amax"),
            ((Partial("max"), S(0), S(0)), (Partial("max"),)),
        ),
        (
            aten._embedding_bag.default,
            (ints(8, 4), below(8, 5), torch.tensor([0, 3]), False, 1),
            ((S(0), R, R), (P, R, R, R)),
        ),
        (aten.isin.Tensor_Tensor, (ints(4), ints(4)), ((R, S(0)), (Partial("max"),))),
        (aten.put.default, (ints(6), below(6, 4), ints(4), True), ((P, S(0), S(0)), (P,))),
        (
            aten._unsafe_masked_index.default,
            (ints(6, 4), ints(3, 5) > 0, [below(6, 3, 1), below(4, 5)], 1),
            ((R, S(1), R, S(0)), (S(1),)),
        ),
        (
            aten._unsafe_masked_index_put_accumulate.default,
            (ints(6, 4), ints(3, 5) > 0, [below(6, 3, 1), below(4, 5)], ints(3, 5)),
            ((P, S(0), S(0), R, S(0)), (P,)),
        ),
        (
            aten._embedding_bag_dense_backward.default,
            (ints(2, 4), below(8, 4), below(2, 4), below(4, 2), below(4, 0), 8, False, 0, None),
            ((R, S(0), S(0), R, R), (P,)),
        ),
    ],
    ids=lambda v: str(v) if isinstance(v, torch._ops.OpOverload) else "",
)
def test_a_rule_has_the_row_that_a_model_needs(op, sample, row):
    call, tensors, whole = call_of(op, sample, {})
    types = [Full(tuple(t.shape), t.dtype) for t in (*tensors, *whole)]
    assert row in [(r.ins, r.outs) for r in rows_of(call, types, 2)]


def test_a_table_cut_in_strides_is_looked_up():
    """A block of several intervals counts as any other."""
    weight, index = ints(8, 4), below(8, 5)
    call, tensors, (whole,) = call_of(aten.embedding.default, (weight, index), {})
    mesh = Mesh(x=2)
    cuts = StridedShard(0, 2), Replicate()
    ins = [TensorType(tuple(t.shape), t.dtype, Layout(mesh, [p])) for t, p in zip(tensors, cuts)]
    out = TensorType(tuple(whole.shape), whole.dtype, Layout(mesh, [P]))
    held = [scatter(t, type, 0) for t, type in zip(tensors, ins)]
    made = [
        local_graph(lowered(call, ins, [out], (rank,)))(*(blocks[rank] for blocks in held))[0]
        for rank in range(2)
    ]
    assert torch.equal(gather_full(made, out), whole)


@pytest.mark.parametrize("dims", [[], [1]])
def test_bits_are_hashed_in_blocks(dims):
    """`verify` does not write 64 bits without a sign."""
    call, (x,), (whole,) = call_of(aten.hash_tensor.default, (ints(6, 3), dims), {})
    mesh = Mesh(x=4)
    full = Full(tuple(whole.shape), whole.dtype)
    rows = rows_of(call, [Full((6, 3), x.dtype), full], 4)
    assert len(rows) == 3
    for row in rows:
        cut = TensorType((6, 3), x.dtype, Layout(mesh, row.ins))
        out = TensorType(full.shape, full.dtype, Layout(mesh, row.outs))
        made = [
            local_graph(lowered(call, [cut], [out], (rank,)))(block)[0]
            for rank, block in enumerate(scatter(x, cut, 0))
        ]
        assert torch.equal(gather_full(made, out).view(torch.int64), whole.view(torch.int64))


X, ROWS, WIDE = Mesh(x=4), Shard(0), Shard(1)


def typed(shape, placement, dtype=torch.float32):
    return TensorType(shape, dtype, Layout(X, [placement]))


def set_where(x, mask):
    x = x.clone()
    x[mask] = 0.5
    return x


BIG = typed((64, 64), WIDE)
TALL, NUMBERS = typed((256, 64), ROWS), typed((256, 64), ROWS, torch.int64)
FEW = typed((8,), R, torch.int64)


@pytest.mark.parametrize(
    ("f", "types", "most"),
    [
        (set_where, (BIG, typed((64, 64), WIDE, torch.bool)), 0),
        (lambda x, at, new: x.put(at, new), (BIG, FEW, typed((8,), R)), 0),
        (lambda x, at: x.take(at), (BIG, FEW), 24),
        (
            lambda x, mask, new: x.masked_scatter(mask, new),
            (typed((64, 64), ROWS), typed((64, 64), ROWS, torch.bool), typed((4096,), R)),
            24,
        ),
        (lambda x: torch.histc(x, 16), (BIG,), 60),
        (lambda x: torch.histc(x, 16, -1, 1), (BIG,), 48),
        (lambda x: torch.histogram(x, 16, density=True)[0], (BIG,), 108),
        (lambda x: torch.histogram(x, 16, range=(0, 1), density=True)[0], (BIG,), 108),
        (lambda x, values: torch.isin(x, values), (typed((16,), R), typed((256,), ROWS)), 12),
        (
            lambda x, at, new: x.scatter_reduce(0, at, new, "amax"),
            (typed((4, 64), R), NUMBERS, TALL),
            1536,  # the result is whole on every rank, as `x` is
        ),
        (
            lambda x, at, new: x.scatter_reduce(0, at, new, "mean", include_self=False),
            (typed((4, 64), R), NUMBERS, TALL),
            3264,
        ),
        (
            lambda x, lengths: torch.segment_reduce(x, "sum", lengths=lengths, unsafe=True),
            (TALL, typed((4,), R, torch.int64)),
            768,
        ),
        (lambda x: torch.nonzero_static(x, size=4), (TALL,), 84),
        (
            lambda table, at: torch.nn.functional.embedding(at, table, max_norm=1.0),
            (BIG, FEW),
            384,
        ),
    ],
)
def test_only_what_must_travels(f, types, most):
    """No operand is gathered: counts, sums and a few numbers for each block are enough."""
    assert trace(f, *types, cost=BYTES, check_indices=False).received_bytes <= most


def test_losses_that_look_at_values_are_recorded_as_ones_that_do_not():
    """With the values and derivatives of torch's own, and without a byte of traffic in these."""
    F = torch.nn.functional
    x, y, var = ints(8, 3), ints(8, 3), ints(8, 3, least=0) / 4
    logs, targets, lengths = ints(6, 8, 4).log_softmax(2), below(4, 8, 3, least=1), below(4, 8)

    def ctc(logs, targets, lengths):
        steps = torch.full_like(lengths, 6)
        return F.ctc_loss(logs, targets, steps, lengths, reduction="sum", zero_infinity=True)

    def gaussian(x, y, var):
        return F.gaussian_nll_loss(x, y, var, full=True, eps=0.5, reduction="sum")

    for f, tensors, cuts in [
        (ctc, (logs, targets, lengths), (WIDE, ROWS, R)),
        (gaussian, (x, y, var), (ROWS,) * 3),
    ]:
        floats = tuple(i for i, t in enumerate(tensors) if t.is_floating_point())
        derived = torch.func.grad(f, floats)
        comm = SimulatedComm(X)
        held = [distribute(t, Layout(X, [p]), comm) for t, p in zip(tensors, cuts)]
        types = [t.type for t in held]
        program = trace(derived, *types, cost=BYTES, check_indices=False)
        assert program.received_bytes == 0
        torch.testing.assert_close(spmd(f)(*held).full(), f(*tensors))
        for made, due in zip(spmd(derived)(*held), derived(*tensors)):
            torch.testing.assert_close(made.full(), due)


def test_a_mask_as_an_index_has_no_rows():
    x, mask = ints(4, 3), ints(4) > 0
    call, tensors, whole = call_of(aten.index.Tensor, (x, [mask]), {})
    types = [Full(tuple(t.shape), t.dtype) for t in (*tensors, *whole)]
    assert len(rows_of(call, types, 2)) == 1
