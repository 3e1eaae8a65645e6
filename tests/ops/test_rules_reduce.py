"""Every row of the reductions and of the ops along one dim holds on blocks."""

from __future__ import annotations

from math import inf

import pytest
import torch

from fdtensor.layouts.dtypes import reducible
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.decompositions import DECOMPOSITIONS, decomposition_of
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import Row
from fdtensor.ops.recorder import record
from fdtensor.ops.rows import rows_of
from fdtensor.programs.tracer import trace
from fdtensor.testing.row_checks import call_of, verify
from tests.operators.check import BYTES
from tests.support.decompositions import differences
from tests.support.nested import nested

aten = torch.ops.aten

SHAPES = [(4, 6), (5, 3), (2, 1, 5), (3,), ()]
"""Sizes that the counts divide, that they do not, and that leave empty blocks."""


def ints(*shape: int, seed: int = 0, least: int = -4, dtype=torch.float32) -> torch.Tensor:
    """Small integers, so that every sum is exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(least, 5, shape, generator=generator).to(dtype)


def order(*shape: int) -> torch.Tensor:
    """Distinct integers in random order, so that every index is unique."""
    count = torch.Size(shape).numel()
    return torch.randperm(count, generator=torch.Generator().manual_seed(1)).view(shape).float()


def dims_of(x: torch.Tensor) -> list:
    """Ways to name dims of `x`."""
    return [*[[d] for d in range(x.ndim)], [-1], list(range(x.ndim)), []][: 2 + x.ndim]


REDUCED = [ints(*shape, seed=i) for i, shape in enumerate(SHAPES)]
ORDERED = [order(*shape) for shape in SHAPES]
BOOLS = [x > 2 for x in REDUCED]
KINDS = [*REDUCED, *BOOLS, ints(5, 3, dtype=torch.int32), ints(4, 2, dtype=torch.bfloat16)]


def by_dims(xs, keepdims=(False, True)):
    """Samples `x, dims, keepdim`."""
    return [(x, dims, k) for x in xs for dims in dims_of(x) for k in keepdims]


def by_dim(xs, *rest):
    """Samples `x, dim, *rest`."""
    return [(x, d, *rest) for x in xs for d in (*range(x.ndim), -1)]


def with_(xs, **kwargs):
    """The samples with keyword arguments."""
    return [(args, kwargs) for args in xs]


EVERY = [(x,) for x in KINDS]
FLOATS = [x for x in KINDS if x.is_floating_point()]
VECTORS = [x for x in REDUCED if x.ndim]
COMPLEX = torch.complex(ints(5, 3), ints(5, 3, seed=1))

SAMPLES = {
    aten.sum.default: [*EVERY, *with_(EVERY, dtype=torch.int64), (COMPLEX,)],
    aten.sum.dim_IntList: by_dims(KINDS),
    aten.nansum.default: [*by_dims(FLOATS), (torch.tensor([1.0, torch.nan, 2.0, 3.0, 5.0]),)],
    aten.mean.default: [*[(x,) for x in FLOATS], *with_(EVERY, dtype=torch.float64)],
    aten.mean.dim: [*by_dims(FLOATS), *with_(by_dims(REDUCED[:2]), dtype=torch.float64)],
    aten.amax.default: by_dims(KINDS),
    aten.amin.default: by_dims(KINDS),
    aten.max.default: EVERY,
    aten.min.default: EVERY,
    aten.aminmax.default: [
        *EVERY,
        *[s for d in range(2) for s in with_([(x,) for x in REDUCED[:3]], dim=d, keepdim=d == 1)],
    ],
    aten.max.dim: [*by_dim(ORDERED), *by_dim(ORDERED, True)],
    aten.min.dim: [*by_dim(ORDERED), *by_dim(ORDERED, True)],
    aten.median.dim: by_dim(ORDERED),
    aten.nanmedian.dim: by_dim(ORDERED),
    aten.mode.default: by_dim(ORDERED),
    aten.kthvalue.default: [(x, 2, d, k) for x in ORDERED[:2] for d in (0, 1) for k in (0, 1)],
    aten.argmax.default: [*[(x,) for x in ORDERED], *by_dim(ORDERED), *by_dim(ORDERED, True)],
    aten.argmin.default: [*[(x,) for x in ORDERED], *by_dim(ORDERED), *by_dim(ORDERED, True)],
    aten.prod.default: [*EVERY, *with_(EVERY, dtype=torch.float64)],
    aten.prod.dim_int: [*by_dim(KINDS), *by_dim(KINDS, True)],
    aten.any.default: EVERY,
    aten.any.dim: [*by_dim(KINDS), *by_dim([ints(4, 3, least=0, dtype=torch.uint8)], True)],
    aten.any.dims: by_dims(KINDS),
    aten.all.default: EVERY,
    aten.all.dim: by_dim(KINDS),
    aten.all.dims: by_dims(KINDS),
    aten.count_nonzero.default: [*EVERY, *by_dim(VECTORS)],
    aten.count_nonzero.dim_IntList: [(x, dims) for x in VECTORS for dims in dims_of(x)],
    **{
        op: [
            s
            for x in (*REDUCED[:3], COMPLEX)
            for dims in (None, *dims_of(x))
            for s in with_([(x, dims)], correction=0, keepdim=len(dims or []) == 1)
        ]
        for op in (
            aten.var.correction,
            aten.std.correction,
            aten.var_mean.correction,
            aten.std_mean.correction,
        )
    },
    aten.linalg_vector_norm.default: [
        (x, p, dims, k)
        for x in (*REDUCED[:4], COMPLEX)
        for p in (2, 1, 0, 3, inf, -inf)
        for dims, k in ((None, False), ([0], True), ([-1], False))
    ],
    aten.logsumexp.default: by_dims(REDUCED[:4]),
    aten.trace.default: [(ints(4, 6),), (ints(3, 2),)],
    aten._softmax.default: by_dim(REDUCED, False),
    aten._log_softmax.default: by_dim(REDUCED, False),
    aten._safe_softmax.default: by_dim(REDUCED),
    aten._softmax_backward_data.default: [
        (ints(*x.shape, seed=9), x, d, x.dtype) for x in VECTORS for d in range(x.ndim)
    ],
    aten._log_softmax_backward_data.default: [
        (ints(*x.shape, seed=9), -x.abs(), d, x.dtype) for x in VECTORS for d in range(x.ndim)
    ],
    aten.cumsum.default: by_dim(KINDS),
    aten.cumprod.default: by_dim(KINDS),
    aten.logcumsumexp.default: by_dim(REDUCED),
    aten.cummax.default: by_dim(ORDERED),
    aten.cummin.default: by_dim(ORDERED),
    aten.sort.default: [*by_dim(ORDERED), *by_dim(ORDERED, True)],
    aten.sort.stable: with_([(x,) for x in KINDS], stable=True, dim=0),
    aten.topk.default: [(x, 2, d) for x in ORDERED[:2] for d in (0, -1)],
    aten.renorm.default: [(x, 2, d, 3.0) for x in REDUCED[:3] for d in (0, -1)],
}

MANY = {aten.sort.default, aten.sort.stable, aten.median.default, aten.median.dim}
MANY |= {aten.nanmedian.default, aten.nanmedian.dim}
"""Ops whose decompositions take many elements: see test_decompositions_order.py."""

DECOMPOSED = [op for op in SAMPLES if op in DECOMPOSITIONS and op not in MANY]


@pytest.mark.one_of("count")
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("op", SAMPLES, ids=str)
def test_every_row_holds_on_blocks(op, count):
    wrong = verify(op, SAMPLES[op], count=count)

    assert not wrong, "\n".join(map(str, wrong[:5]))


@pytest.mark.parametrize(
    "op", [aten.mean.dim, aten.amax.default, aten.any.dims, aten.cumsum.default], ids=str
)
def test_rows_of_two_axes_hold_together(op):
    assert not [*nested(op, SAMPLES[op][0])]


@pytest.mark.parametrize("op", SAMPLES, ids=str)
def test_every_pending_term_can_be_reduced(op):
    for sample in SAMPLES[op]:
        args, kwargs = sample if isinstance(sample[-1], dict) else (sample, {})
        call, ins, outs = call_of(op, args, kwargs)
        types = [Full(tuple(t.shape), t.dtype) for t in (*ins, *outs)]
        for row in rows_of(call, types, 2):
            for placed, full in zip((*row.ins, *row.outs), types):
                assert not isinstance(placed, Partial) or reducible(full.dtype, placed.reduce_op)


@pytest.mark.parametrize("op", DECOMPOSED, ids=str)
def test_a_decomposition_gives_what_the_op_gives(op):
    assert not differences(op, SAMPLES[op])


def test_rows_are_as_written():
    x = Full((4, 6), torch.float32)
    call = record(lambda ts: [ts[0].sum(1)], [x]).calls[0]

    rows = rows_of(call, [x, Full((4,), torch.float32)], 2)

    assert [str(row) for row in rows] == [
        "R -> R",
        "S(0) -> S(0)",
        "S(1) -> P(sum)",
        "P(sum) -> P(sum)",
    ]


def test_a_wrong_row_is_found():
    wrong = verify(aten.var.correction, [(ints(4, 6), [1])], [Row((Shard(1),), (Partial("sum"),))])

    assert len(wrong) == 1


SPECIAL = torch.tensor([[-inf, 1.0, inf], [-inf, -inf, -inf], [torch.nan, 0.0, 2.0]])


@pytest.mark.parametrize(
    ("op", "rest"),
    [
        (aten.logsumexp.default, ([1],)),
        (aten._safe_softmax.default, (1,)),
        (aten._softmax.default, (1, False)),
        (aten._log_softmax.default, (1, False)),
        (aten.argmax.default, (1,)),
        (aten.argmin.default, (None, True)),
        (aten.max.dim, (1,)),
        (aten.min.dim, (1, True)),
        (aten.var.correction, ([1],)),
        (aten.cumsum.default, (1,)),
        (aten.cumprod.default, (0,)),
        (aten.logcumsumexp.default, (1,)),
        (aten.cummax.default, (1,)),
        (aten.cummin.default, (0,)),
    ],
    ids=str,
)
def test_infinities_and_nans_come_out_as_from_the_kernel(op, rest):
    assert not differences(op, [(SPECIAL, *rest), (SPECIAL.bfloat16(), *rest)])


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_blocks_of_any_size_give_what_the_op_gives(blocks):
    """The last ones may be short or empty; the last of equals is kept, and a nan stays."""
    ties = [torch.tensor([3.0, 1.0, 3.0, 1.0, 2.0, 3.0, 0.0]), *SPECIAL.unbind(), torch.ones(5) > 0]
    for op in (aten.cummax.default, aten.cummin.default):
        assert not differences(op, [(x, 0) for x in ties], blocks=blocks)
    for op in (aten.cumsum.default, aten.cumprod.default):
        assert not differences(
            op, [(x, 0) for x in (*ties, ints(7, dtype=torch.int32))], blocks=blocks
        )
    some = [x for x in SPECIAL.unbind() if x.unique().numel() == 3] + [order(9), order(5)]
    for op in (aten.topk.default, aten.kthvalue.default):
        assert not differences(op, [(x, k) for x in some for k in (1, 2, 3)], blocks=blocks)
    smallest = [(x, k, 0, False) for x in some for k in (1, 3)]
    assert not differences(aten.topk.default, smallest, blocks=blocks)


ALONG = {
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "cummax": lambda x: x.cummax(0),
    "topk": lambda x: x.topk(2, 0),
    "kthvalue": lambda x: x.kthvalue(4095, 0),
    "argmax": lambda x: x.argmax(),
    "max": lambda x: x.max(0),
}


@pytest.mark.parametrize("rows", [4096, 4098])
@pytest.mark.parametrize("name", ALONG)
def test_of_a_cut_dim_a_few_elements_a_slice_move(name, rows):
    """Values and places of two elements of each block, or less."""
    x = TensorType((rows, 8), torch.float32, Layout(Mesh(x=4), [Shard(0)]))
    program = trace(ALONG[name], x, cost=BYTES)

    assert 0 < program.received_bytes <= 8 * 4 * 2 * (4 + 8)


def test_the_first_of_equals_is_the_extreme():
    ties = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]])

    for op in (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default):
        assert not differences(op, [(ties, 1), (ties.int(), 1), (ties, 0)])
    for op in (aten.argmax.default, aten.argmin.default):
        assert not differences(op, [(ties,), (ties.T.contiguous(),), (SPECIAL,)])


def test_a_decomposition_is_as_exact_as_the_kernel_far_from_zero():
    far = torch.randn(64, generator=torch.Generator().manual_seed(0)).add(1e4)

    for op, rest in (
        (aten.var.correction, ([0],)),
        (aten.logsumexp.default, ([0],)),
        (aten._log_softmax.default, (0, False)),
    ):
        assert not differences(op, [(far, *rest)])


def test_other_ops_decompose_as_torch_says():
    assert decomposition_of(aten.addcmul.default) is not None
    assert decomposition_of(aten.mm.default) is None
    assert decomposition_of(aten.var.correction) is DECOMPOSITIONS[aten.var.correction]
