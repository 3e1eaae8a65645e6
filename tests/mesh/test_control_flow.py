"""Branches on real ranks: those that do not count are not run, and send nothing."""

import pytest
import torch
from torch._higher_order_ops.while_loop import while_loop

from fdtensor import Mesh, connect, distribute, scan, spmd

pytestmark = pytest.mark.mesh

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
    for grads, own, of_autograd in pool4.run(on_this_rank, scale):
        torch.testing.assert_close(grads, list(known))
        torch.testing.assert_close(of_autograd, known[0])
        assert own == pytest.approx(value.item(), rel=1e-12)


def converges(loop, a, b):
    """Steps of Jacobi for a system that is diagonally dominant, until nothing changes much."""
    inverse, rest = 1 / a.diagonal(), a - torch.diag(a.diagonal())

    def step(i, x, change):
        after = inverse * (b - rest @ x)
        _, after = loop(lambda j, y: j < 2, lambda j, y: (j + 1, y.clamp(max=9)), (0, after))
        return i + 1, after, (after - x).abs().max()

    def condition(i, x, change):
        return (i < 100) & (change > 1e-9)

    return loop(condition, step, (0, torch.zeros_like(b), b.abs().max() + 1))[:2]


def system():
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.rand(shape, generator=generator).double() for shape in ((10, 10), (10,)))
    return a + 10 * torch.eye(10), b


def solved(layout_of_a, layout_of_b):
    comm = connect(MESH)
    a, b = system()
    a = distribute(a, MESH.layout(*layout_of_a), comm)
    b = distribute(b, MESH.layout(*layout_of_b), comm)
    solve = spmd(lambda a, b: converges(while_loop, a, b))
    steps, x = solve(a, b)
    with torch.profiler.profile() as seen:
        steps, x = solve(a, b)
    names = {event.name for event in seen.events()}
    return steps.item(), x.full(), "fdtensor <lambda>" in names


@pytest.mark.parametrize("layouts", [(("x",), ("x",)), ((None, "x"), ()), ((), ("x",))])
def test_a_loop_ends_on_all_ranks_after_the_same_step(pool4, layouts):
    a, b = system()
    due = torch.linalg.solve(a, b)
    ends = pool4.run(solved, *layouts)
    assert len({steps for steps, *_ in ends}) == 1
    assert 5 < ends[0][0] < 100
    for _, x, seen in ends:
        torch.testing.assert_close(x, due, rtol=1e-7, atol=1e-7)
        assert seen


def deep(w, x):
    """Layers in a scan, which all ranks walk through together, and a branch in each."""

    def layer(h, w):
        h = torch.cond(h.sum() > 0, lambda: torch.tanh(h @ w), lambda: h - w.sum(0))
        return h, h.square().sum()

    h, norms = scan(layer, x, w)
    return h.square().sum() + norms.sum()


def deep_plainly(w, x):
    total = 0
    for own in w:
        x = torch.tanh(x @ own) if x.sum() > 0 else x - own.sum(0)
        total = total + x.square().sum()
    return x.square().sum() + total


def layers():
    generator = torch.Generator().manual_seed(4)
    w, x = (torch.randn(shape, generator=generator).double() for shape in ((6, 8, 8), (12, 8)))
    return w / 2, x


def gradients_of_layers(of_w, of_x):
    comm = connect(MESH)
    w, x = layers()
    w = distribute(w, MESH.layout(*of_w), comm)
    x = distribute(x, MESH.layout(*of_x), comm)
    step = spmd(torch.func.grad(deep, (0, 1)))
    grads = [g.full() for g in step(w, x)]
    held = x.requires_grad_()
    spmd(deep)(w, held).backward()
    return grads, held.grad.full()


@pytest.mark.parametrize("of_w", [(), (None, "x"), (None, None, "x"), ("x",)])
def test_a_scan_and_its_gradient_on_ranks(pool4, of_w):
    due = torch.func.grad(deep_plainly, (0, 1))(*layers())
    for grads, of_autograd in pool4.run(gradients_of_layers, of_w, ("x",)):
        torch.testing.assert_close(grads, list(due))
        torch.testing.assert_close(of_autograd, due[1])
