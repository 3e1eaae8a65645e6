"""Branches on real ranks: those that do not count are not run, and send nothing."""

import pytest
import torch

from fdtensor import Mesh, connect, distribute, spmd

pytestmark = pytest.mark.mesh

SECONDS = 60
MESH = Mesh(x=4)


def f(x, w):
    def inner(y):
        return torch.cond(y.max() > 3, lambda: (y @ w).relu(), lambda: y * 2)

    return torch.cond(x.sum() > 0, lambda: inner(x) @ w, lambda: x + 1)


def plain(x, w):
    if x.sum() > 0:
        return ((x @ w).relu() if x.max() > 3 else x * 2) @ w
    return x + 1


def operands(scale):
    generator = torch.Generator().manual_seed(2)
    x, w = (torch.rand(8, 8, generator=generator, dtype=torch.float64) for _ in "xw")
    return x * scale, w


def on_this_rank(scale):
    """The value and gradients of a function with branches in one another."""
    comm = connect(MESH)
    x, w = (distribute(t, MESH.layout("x"), comm) for t in operands(scale))
    step = spmd(torch.func.grad_and_value(lambda x, w: f(x, w).sum(), (0, 1)), choice="follow")
    grads, value = step(x, w)
    held = distribute(operands(scale)[0], MESH.layout("x"), comm).requires_grad_()
    spmd(lambda x, w: f(x, w).sum())(held, w).backward()
    return [g.full() for g in grads], value.item(), held.grad.full()


@pytest.mark.parametrize("scale", [5.0, 0.5, -1.0])
def test_branches_in_one_another(pool4, scale):
    known, value = torch.func.grad_and_value(lambda x, w: plain(x, w).sum(), (0, 1))(
        *operands(scale)
    )
    for grads, own, of_autograd in pool4.run(on_this_rank, scale, timeout=SECONDS):
        torch.testing.assert_close(grads, list(known))
        torch.testing.assert_close(of_autograd, known[0])
        assert own == pytest.approx(value.item(), rel=1e-12)
