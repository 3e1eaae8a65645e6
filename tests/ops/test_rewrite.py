"""Runs of calls that one op says better: scans that go from the end, losses of classes."""

import pytest
import torch
import torch.nn.functional as F

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Full
from fdtensor.ops.recorder import record
from fdtensor.ops.rewrite import BACKWARD_SCANS, CROSS_ENTROPY_BACKWARD, rewritten
from fdtensor.programs.tracer import trace
from fdtensor.runtime.all_ranks import run_lines
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.spmd import spmd
from fdtensor.testing.row_checks import verify
from fdtensor.testing.values import block, scatter
from tests.support.decompositions import differences
from tests.support.nested import nested

aten = torch.ops.aten
SCANS = list(BACKWARD_SCANS.values())
SAMPLES = [
    (torch.arange(n * 3.0).reshape(n, 3) - 4, dim) for n in (1, 4, 5, 6, 8) for dim in (0, 1, -1)
]


def from_end(x):
    return x.flip(0).cumsum(0).flip(0)


def turned_elsewhere(x):
    return x.flip(1).cumsum(0).flip(0)


def cast(x):
    return x.flip(0).cumsum(0, dtype=torch.float64).flip(0)


def test_a_scan_between_two_flips_is_one_op():
    graph = rewritten(record(lambda x: [from_end(x[0])], [Full((4, 3), torch.float32)]))
    assert [call.op for call in graph.calls] == [BACKWARD_SCANS[aten.cumsum.default]]


@pytest.mark.parametrize("f", [turned_elsewhere, cast])
def test_other_flips_stay(f):
    graph = rewritten(record(lambda x: [f(x[0])], [Full((4, 3), torch.float32)]))
    assert not {call.op for call in graph.calls} & set(SCANS)


@pytest.mark.parametrize("op", SCANS, ids=str)
def test_scans_from_the_end_hold_on_blocks(op):
    assert not verify(op, SAMPLES)
    assert not [*nested(op, SAMPLES[4])]


@pytest.mark.parametrize("op", SCANS, ids=str)
def test_scans_from_the_end_by_blocks(op):
    assert not differences(op, SAMPLES, blocks=4)
    assert not differences(op, SAMPLES, blocks=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 5, 2])
def test_they_send_what_blocks_come_to(dtype, size):
    mesh = Mesh(x=4)
    full = torch.randint(0, 2, (size, 16)).to(dtype)
    type = TensorType((size, 16), dtype, Layout(mesh, [Shard(0)]))

    program = trace(from_end, type)
    (made,) = run_lines(program, [scatter(full, type, 0)], SimulatedComm(mesh))

    (out,) = program.out_types
    for rank, local in enumerate(made):
        assert torch.equal(local, block(from_end(full), out, rank))


def test_the_gradient_of_a_scan_sends_what_blocks_come_to():
    type = TensorType((256, 64), torch.float32, Layout(Mesh(x=4), [Shard(0)]))

    def loss(x, w):
        return (x.cumsum(0) * w).sum()

    program = trace(torch.func.grad(loss), type, type)

    assert program.received_bytes < 8 * 64 * 4, program
    text = str(program.to_fx(1).graph)
    assert "cumsum" in text
    assert "from_end" not in text


def test_a_count_of_bools_that_becomes_a_float_is_counted_as_one():
    """So that it may wait with other sums; not where floats could not hold it."""
    mesh = Mesh(x=4)

    def ops(size, dtype):
        x = TensorType((size,), torch.float32, mesh.layout("x"))
        program = trace(lambda x: (x > 0).sum().to(dtype), x)
        return [eqn.op for eqn in program.eqns]

    cast = torch.ops.aten._to_copy.default
    assert cast not in ops(1 << 20, torch.float32)
    assert cast in ops(1 << 25, torch.float32)
    assert cast not in ops(1 << 25, torch.float64)
    assert cast in ops(1 << 10, torch.float16)


# --- the backward of a cross entropy -----------------------------------------------------------


def likelihoods():
    """Arguments of the op: gradient, result of `log_softmax`, target, weight, and how to reduce."""
    generator = torch.Generator().manual_seed(0)
    for shape, reduction in [((6, 5), 0), ((5, 4), 1), ((4, 6), 2), ((2, 5, 3, 2), 0), ((3, 4), 1)]:
        of_samples = (shape[0], *shape[2:])
        out = torch.randn(shape, generator=generator, dtype=torch.float64).log_softmax(1)
        target = torch.randint(0, shape[1], of_samples, generator=generator)
        target.view(-1)[0] = -100
        grad = torch.randn(of_samples if reduction == 0 else (), generator=generator).double()
        weight = torch.rand(shape[1], generator=generator).double() if shape[1] == 5 else None
        total = torch.tensor(3.0, dtype=torch.float64)
        yield grad, out, target, weight, reduction, -100, total, torch.float64


def test_the_backward_of_a_cross_entropy_is_that_of_its_parts_on_blocks_and_by_classes():
    samples = list(likelihoods())
    for grad, out, *args, dtype in samples:
        back = aten.nll_loss_backward if out.ndim == 2 else aten.nll_loss2d_backward
        parts = aten._log_softmax_backward_data(back.default(grad, out, *args), out, 1, dtype)
        assert torch.equal(CROSS_ENTROPY_BACKWARD(grad, out, *args, dtype), parts)
    assert not verify(CROSS_ENTROPY_BACKWARD, samples)
    assert not differences(CROSS_ENTROPY_BACKWARD, samples)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_classes_that_are_cut_send_nothing_for_it(reduction, weighted):
    mesh = Mesh(tp=4)
    types = [
        TensorType((8, 12), torch.float32, mesh.layout(None, "tp")),
        TensorType((8,), torch.int64, mesh.layout()),
        *([TensorType((12,), torch.float32, mesh.layout())] if weighted else []),
    ]

    def loss(x, target, weight=None):
        return F.cross_entropy(x, target, weight, reduction=reduction)

    once = trace(loss, *types, choice="follow")
    both = trace(torch.func.grad_and_value(loss), *types, choice="follow")
    assert "cross_entropy_backward" not in str(both), "its classes are cut: in simpler ops"
    assert both.received_bytes == once.received_bytes


def test_other_gradients_of_log_softmax_stay():
    def f(x, target):
        out = x.log_softmax(1)
        return F.nll_loss(out, target) + out.square().sum()

    types = [Full((4, 3), torch.float32), Full((4,), torch.int64)]
    graph = rewritten(record(lambda x: [torch.func.grad(f)(*x)], types))
    assert CROSS_ENTROPY_BACKWARD not in [call.op for call in graph.calls]


def ops_of(f, *shapes):
    types = [Full(shape, torch.float64) for shape in shapes]
    return [call.op for call in rewritten(record(lambda x: [f(*x)], types)).calls]


def gate(x, w):
    return (F.silu(x) * w).square().sum()


def test_the_gradient_of_silu_is_one_op():
    ops = ops_of(torch.func.grad(gate), (4, 3), (4, 3))
    assert ops.count(aten.silu_backward.default) == 1
    assert aten.sigmoid.default not in ops


def test_that_of_its_gradient_is_right_too():
    def curved(x, w):
        return torch.func.grad(gate)(x, w).square().sum()

    mesh = Mesh(x=2)
    comm = SimulatedComm(mesh)
    x, w = (torch.randn(4, 3, dtype=torch.float64) for _ in "xw")
    args = [distribute(t, mesh.layout("x"), comm) for t in (x, w)]
    for f in (torch.func.grad(gate), torch.func.grad(curved)):
        torch.testing.assert_close(spmd(f)(*args).full(), f(x, w))


def test_what_only_looks_like_the_gradient_of_silu_stays():
    def is_one_op(one=1.0, filled=1.0, x_of=lambda x, w: x, w_shape=(4, 3), **alpha):
        def alike(x, w):
            s = x.sigmoid()
            rest = aten.fill.Scalar(torch.empty_like(s), filled) - s
            return w * s * aten.add.Scalar(x_of(x, w) * rest, one, **alpha)

        return aten.silu_backward.default in ops_of(alike, (4, 3), w_shape)

    assert is_one_op()
    assert not is_one_op(one=2.0)
    assert not is_one_op(filled=2.0)
    assert not is_one_op(x_of=lambda x, w: w)
    assert not is_one_op(w_shape=(3,))
    assert not is_one_op(alpha=2)


@pytest.mark.parametrize("like", [torch.zeros_like, torch.ones_like, lambda x: x.sum() * 0])
def test_a_gradient_alone_needs_no_loss(like):
    """What a number is like is not computed for it; what is multiplied by 0 is."""
    mesh = Mesh(x=2)
    x = TensorType((4, 3), torch.float64, mesh.layout("x"))
    lines = str(trace(torch.func.grad(lambda x: x.sin().sum()), x))
    assert "sum" not in lines
    assert " sin " not in lines
    sums = "sum" in str(trace(lambda x: x + like(x.sum()), x))
    assert sums == (like not in (torch.zeros_like, torch.ones_like))


@pytest.mark.parametrize("dtype", [None, torch.int64])
@pytest.mark.parametrize(
    "like",
    [torch.zeros_like, torch.ones_like, lambda x, **how: torch.full_like(x, 3, **how)],
)
def test_numbers_like_others_are_those_of_torch(like, dtype):
    mesh = Mesh(x=2)
    x = distribute(torch.arange(4.0), mesh.layout("x"), SimulatedComm(mesh))
    out = spmd(lambda x: like(x.sum(), dtype=dtype))(x).full()
    wanted = like(torch.tensor(6.0), dtype=dtype)
    assert torch.equal(out, wanted)
    assert out.dtype is wanted.dtype
