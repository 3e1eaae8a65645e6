"""Functions that run op by op on real ranks: gradients, and what comes to every rank."""

import sys
from unittest import mock

import pytest
import torch

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.mesh import Mesh
from fdtensor.tensors.calls.functions import function_of
from fdtensor.tensors.connect import connect
from fdtensor.tensors.distribution import distribute
from tests.tensors.test_by_op import SHAPES, ints, layer, plain_parameters

pytestmark = pytest.mark.mesh

LINE, SQUARE, SOME = Mesh(x=4), Mesh(y=2, x=2), Mesh.from_ranks([3, 1], "x")


def on_this_rank(mesh, peek):
    """The gradients of a layer by its parameters and by what is in between, and second ones."""
    comm = connect(Mesh(world=4))
    rows, columns, whole = mesh.layout("x"), mesh.layout(None, "x"), mesh.layout()
    fulls = [ints(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    pairs = zip(fulls, (rows, rows, columns, whole), strict=True)
    own = [distribute(full, layout, comm).requires_grad_() for full, layout in pairs]

    def enter(x):
        return x.redistribute(whole)

    h, y, loss = layer(*own, enter, lambda y: y.redistribute(rows))
    if peek:
        y.full()
    grads = torch.autograd.grad(loss, [*own, h, y], create_graph=True)
    again = torch.autograd.grad(sum((g.square().sum() for g in grads[:4]), 0 * loss), own)
    _, _, loss = layer(*own, enter, lambda y: y.redistribute(rows))
    loss.backward()
    return [x.full().detach() for x in (*grads, *again, *(x.grad for x in own))]


@pytest.mark.parametrize("peek", [False, True])
@pytest.mark.parametrize("mesh", [LINE, SQUARE, SOME], ids=repr)
def test_gradients_are_those_of_one_process(pool4, mesh, peek):
    plain = plain_parameters()
    h, y, loss = layer(*plain, lambda x: x, lambda x: x)
    grads = torch.autograd.grad(loss, [*plain, h, y], create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in grads[:4]), plain)
    wanted = [t.detach() for t in (*grads, *again, *grads[:4])]
    for given in pool4.run(on_this_rank, mesh, peek):
        for a, b in zip(given, wanted, strict=True):
            assert torch.equal(a, b)


def looked_at_by_one():
    """What a rank hears that looks alone at what all of them are to reduce."""
    comm = connect(LINE, timeout=3)
    y = distribute(ints(8, 12), LINE.layout(None, "x"), comm) @ distribute(
        ints(12, 4), LINE.layout("x"), comm
    )
    said = repr(y)
    try:
        if comm.rank == 0:
            y.full()
        else:
            distribute(ints(4), LINE.layout("x"), comm).redistribute(LINE.layout()).full()
    except CommError as error:
        return said, str(error)
    return said, ""


def test_a_rank_that_reduces_a_sum_alone_is_told_and_the_others_too(pool4):
    for said, told in pool4.run(looked_at_by_one):
        assert said.endswith("owes the sum over x)")
        assert "do not agree" in told
        assert "rank 0 is at `this plan` test_by_op.py" in told


def known_of_relu():
    """How many calls of `relu` are known in the end, of operands of many shapes that owe sums."""
    comm, relu, module = (
        connect(LINE),
        function_of(torch.relu),
        sys.modules["fdtensor.tensors.call"],
    )
    with mock.patch.object(module, "CACHED", 3):
        for rows in range(2, 8):
            a = distribute(ints(rows, 8), LINE.layout(None, "x"), comm)
            b = distribute(ints(8, 3), LINE.layout("x"), comm)
            for _ in range(3):
                assert torch.equal(torch.relu(a @ b).full(), torch.relu(ints(rows, 8) @ ints(8, 3)))
    return len(relu.quick), [e is module._REDUCED_FIRST for e in relu.quick.values()]


def test_few_calls_are_known_of_what_is_reduced_first(pool4):
    for known, reduced_first in pool4.run(known_of_relu):
        assert known <= 3
        assert any(reduced_first)


def loss_read_by_one():
    """A loss that requires grad, which one rank prints while the others go on."""
    comm = connect(LINE, timeout=5)
    x = distribute(ints(8, 4), LINE.layout("x"), comm).requires_grad_()
    loss = (x * x).mean()
    read = [loss.item(), float(loss), f"{loss:.2f}", loss.tolist()] if comm.rank == 2 else []
    loss.backward()
    return read, x.grad.full()


def test_one_rank_may_read_a_loss_that_requires_grad(pool4):
    plain = ints(8, 4).requires_grad_()
    loss = (plain * plain).mean()
    loss.backward()
    for rank, (read, grad) in enumerate(pool4.run(loss_read_by_one)):
        assert torch.equal(grad, plain.grad)
        assert not read or rank == 2
        assert read in ([], [loss.item(), loss.item(), f"{loss.item():.2f}", loss.item()])


ON_EMPTY_BLOCKS = {
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (3,)).square(),
    "mse_loss": lambda x: torch.nn.functional.mse_loss(x, x * 0, reduction="none"),
    "diagonal": lambda x: x.diagonal() * 2,
    "interpolate": lambda x: torch.nn.functional.interpolate(x[None], size=6)[0],
}


def derived_twice(name):
    comm, gradients = connect(Mesh(x=4)), []
    for _ in range(2):
        x = distribute(torch.tensor([[1.0, 2.0, 4.0]]).double(), comm.mesh.layout("x"), comm)
        x = x.requires_grad_()
        y = ON_EMPTY_BLOCKS[name](x)
        assert y.requires_grad
        y.sum().backward()
        gradients.append(x.grad.full())
    return gradients


@pytest.mark.parametrize("name", ON_EMPTY_BLOCKS)
def test_ranks_that_hold_nothing_take_part_in_derivatives(pool4, name):
    x = torch.tensor([[1.0, 2.0, 4.0]]).double().requires_grad_()
    ON_EMPTY_BLOCKS[name](x).sum().backward()
    for gradients in pool4.run(derived_twice, name):
        for gradient in gradients:
            torch.testing.assert_close(gradient, x.grad)
