"""Rules of look-ups, gathers, scatters and writes at indices: every row holds, nested ones too."""

import pytest
import torch

from fdtensor.graph import Full
from fdtensor.layout import Layout, TensorType
from fdtensor.lower import local_graph, lowered
from fdtensor.mesh import Mesh
from fdtensor.placement import Partial, Replicate, Shard, StridedShard
from fdtensor.rows import rows_of
from fdtensor.rules.core import rule_of
from fdtensor.testing.values import gather_full, scatter
from fdtensor.verify import call_of, verify
from tests.nested import ints, nested

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
        for reduce, own in [("sum", True), ("sum", False), ("mean", False), ("amax", True)]:
            yield aten.scatter_reduce.two, ((x, dim, often, src, reduce), {"include_self": own})


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
        yield aten.index_reduce.default, (x, dim, often, source, "prod")
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


FAMILIES = [embeddings, bags, gathers, scatters, slices, indexings, searches]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_every_row_holds_on_blocks(family, count):
    """Blocks that divide evenly, that do not, and empty ones; pending terms are random."""
    samples = list(family())
    assert all(rule_of(op) is not None for op, _ in samples)
    wrong = [w for op, sample in samples for w in verify(op, [sample], count=count)]
    assert not wrong, "\n".join(map(str, wrong[:5]))


@pytest.mark.parametrize("family", [embeddings, gathers, scatters, slices, indexings, searches])
def test_rows_of_two_axes_hold_together(family):
    """Each op's last sample of two dims, on a mesh of two axes, for all pairs of rows."""
    last = {}
    for op, sample in family():
        if op not in last or len(last) % 2:
            last[op] = sample
    wrong = [found for op, sample in last.items() for found in nested(op, sample)]
    assert not wrong, "\n".join(wrong[:5])


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


def test_a_mask_as_an_index_has_no_rows():
    x, mask = ints(4, 3), ints(4) > 0
    call, tensors, whole = call_of(aten.index.Tensor, (x, [mask]), {})
    types = [Full(tuple(t.shape), t.dtype) for t in (*tensors, *whole)]
    assert len(rows_of(call, types, 2)) == 1
