"""A sum that is read once is reduced once: terms are added before they are."""

import pytest
import torch
import torch.nn.functional as F

from fdtensor import Mesh, SimulatedComm, TensorType, distribute, from_local, spmd, trace

MESH = Mesh(dp=8)
R = MESH.layout()
SIZE = 1 << 20
ALL_REDUCED = 2 * SIZE * 4 * 7 // 8
"""The bytes that an all-reduce of `SIZE` f32 takes."""


def weights():
    return TensorType((1024, 1024), torch.float32, R)


def batches(*shape):
    return TensorType(shape, torch.float32, MESH.layout(None, "dp"))


def two(a, b):
    return a + b


def three(a, b, c):
    return a - 2 * b + c


@pytest.mark.parametrize(("f", "count"), [(two, 2), (three, 3)])
@pytest.mark.parametrize("out", [R, MESH.layout("dp"), None])
def test_terms_of_a_sum_are_added_before_they_are_reduced(f, count, out):
    pending = TensorType((1024, 1024), torch.float32, MESH.layout(partial={"dp": "sum"}))
    program = trace(f, *[pending] * count, out_layouts=out)
    assert len(program.collectives) == 1
    assert program.received_bytes == (ALL_REDUCED if out is R else ALL_REDUCED // 2)


def rnn(x, w):
    def loss(w):
        h = torch.zeros_like(x[0])
        for t in range(10):
            h = torch.tanh(h @ w + x[t])
        return (h * h).sum()

    return torch.func.grad(loss)(w)


def microbatches(x, w):
    total = torch.zeros_like(w)
    for i in range(4):
        total = total + torch.func.grad(lambda w, i=i: torch.tanh(x[i] @ w).square().sum())(w)
    return total


@pytest.mark.parametrize(("f", "shape"), [(rnn, (10, 512, 1024)), (microbatches, (4, 512, 1024))])
def test_gradients_that_add_up_are_reduced_once(f, shape):
    program = trace(f, batches(*shape), weights(), out_layouts=R)
    assert len(program.collectives) == 1
    assert program.received_bytes == ALL_REDUCED


def tied(table, ids):
    def loss(table):
        h = torch.tanh(F.embedding(ids, table))
        return F.cross_entropy((h @ table.T).flatten(0, 1), ids.flatten())

    return torch.func.grad(loss)(table)


def test_both_gradients_of_a_tied_embedding_are_reduced_once():
    ids = TensorType((512, 64), torch.int64, MESH.layout("dp"))
    program = trace(tied, weights(), ids, out_layouts=R, check_indices=False)
    assert program.received_bytes < ALL_REDUCED + 4096


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 4}, {"tp": 4, "dp": 2}])
def test_a_sum_over_two_axes_is_reduced_once(axes):
    mesh = Mesh(**axes)
    pending = TensorType((64, 64), torch.float32, mesh.layout(partial=dict.fromkeys(axes, "sum")))
    program = trace(two, pending, pending, out_layouts=mesh.layout())
    assert program.received_bytes == 2 * 64 * 64 * 4 * 7 // 8


def test_the_values_are_those_of_one_process():
    comm = SimulatedComm(MESH)
    terms = torch.randint(-9, 10, (3, 8, 4, 4)).double()
    type = TensorType((4, 4), torch.float64, MESH.layout(partial={"dp": "sum"}))
    given = [from_local(tuple(t), type, comm) for t in terms]
    assert torch.equal(spmd(three)(*given).full(), three(*terms.sum(1)))
    x, w = torch.randn(4, 8, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    spread = distribute(x, MESH.layout(None, "dp"), comm), distribute(w, R, comm)
    torch.testing.assert_close(spmd(microbatches)(*spread).full(), microbatches(x, w))
