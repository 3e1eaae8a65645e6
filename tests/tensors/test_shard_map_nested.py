"""`shard_map` in a function of `shard_map`: over the axes along which its tensors are whole."""

import pytest
import torch

import fdtensor as fd
from fdtensor import Mesh, SimulatedComm, connect, distribute, shard_map, spmd
from fdtensor.errors import LayoutError, TraceError

MESH = Mesh(a=2, b=2)


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(x, w, mesh=MESH):
    """A product whose sum is cut along `b`, in a function that is cut along `a`."""
    columns, rows, whole = mesh.layout(None, "b"), mesh.layout("b"), mesh.layout()

    def part(y, v):
        return fd.psum(y @ v, "b"), y.exp(), (y.sum(0) * 2 + v.sum(1))

    def outer(x, w):
        h = torch.tanh(x @ w)
        product, grown, sums = shard_map(
            part, mesh, (columns, rows), (whole, columns, mesh.layout("b"))
        )(h, w)
        return product * grown + h * sums

    return shard_map(outer, mesh, (mesh.layout("a"), whole), mesh.layout("a"))(x, w)


def plainly(x, w):
    h = torch.tanh(x @ w)
    sums = torch.cat([h.chunk(2)[i].sum(0, keepdim=True) for i in range(2)])
    sums = (sums * 2 + w.sum(1)).repeat_interleave(h.shape[0] // 2, 0)
    return (h @ w) * h.exp() + h * sums


def operands(comm, width=4):
    own = drawn(4, width, seed=1), drawn(width, width, seed=2) / 2
    return own, [distribute(t, MESH.layout("a"), comm) for t in own]


@pytest.mark.parametrize("width", [4, 5])
def test_a_function_in_a_function(width):
    own, (x, w) = operands(SimulatedComm(MESH), width)
    torch.testing.assert_close(by_hand(x, w).full(), plainly(*own))
    due = torch.func.grad(lambda x, w: (plainly(x, w) ** 2).sum(), (0, 1))(*own)
    held = [t.clone().requires_grad_() for t in own]
    there = [distribute(t, d.type.layout, d.comm) for t, d in zip(held, (x, w), strict=True)]
    by_hand(*there).full().square().sum().backward()
    for leaf, known in zip(held, due, strict=True):
        torch.testing.assert_close(leaf.grad, known)


def test_in_a_traced_function():
    own, (x, w) = operands(SimulatedComm(MESH))
    torch.testing.assert_close(spmd(by_hand)(x, w).full(), plainly(*own))
    due = torch.func.grad(lambda x, w: (plainly(x, w) ** 2).sum(), (0, 1))(*own)
    grads = spmd(torch.func.grad(lambda x, w: (by_hand(x, w) ** 2).sum(), (0, 1)))(x, w)
    for grad, known in zip(grads, due, strict=True):
        torch.testing.assert_close(grad.full(), known)


def on_this_rank():
    comm = connect(MESH)
    (own, (x, w)) = operands(comm)
    held = own[0].clone().requires_grad_()
    by_hand(distribute(held, MESH.layout("a"), comm), w).full().square().sum().backward()
    return by_hand(x, w).full(), held.grad


@pytest.mark.mesh
def test_on_real_ranks(pool4):
    own, _ = operands(SimulatedComm(MESH))
    due = torch.func.grad(lambda x: (plainly(x, own[1]) ** 2).sum())(own[0])
    for value, grad in pool4.run(on_this_rank):
        torch.testing.assert_close(value, plainly(*own))
        torch.testing.assert_close(grad, due)


def test_blocks_of_several_axes_and_pending_results():
    mesh = Mesh(a=2, b=2, c=2)
    comm = SimulatedComm(mesh)
    x = distribute(drawn(8, 10, seed=3), mesh.layout("a"), comm)
    cut, pending = mesh.layout(None, ("c", "b")), mesh.layout(partial={"b": "sum", "c": "sum"})

    def outer(x):
        twice, total = shard_map(lambda y: (y * 2, y.sum(1)), mesh, cut, (cut, pending))(x)
        return twice + total[:, None]

    out = shard_map(outer, mesh, mesh.layout("a"), mesh.layout("a"))(x).full()
    torch.testing.assert_close(out, 2 * x.full() + x.full().sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("mesh", "ins", "outs", "text"),
    [
        (Mesh(d=2), None, None, "over axes that the ranks around do not have"),
        (MESH, MESH.layout(partial={"b": "sum"}), None, "is pending in its layout"),
        (MESH, None, MESH.layout(partial={"b": "max"}), "is not whole by gathering"),
    ],
)
def test_what_does_not_fit_is_told(mesh, ins, outs, text):
    _, (x, _) = operands(SimulatedComm(MESH))
    inner = shard_map(lambda y: y, mesh, ins, outs)
    with pytest.raises((LayoutError, TraceError), match=text):
        shard_map(inner, MESH, MESH.layout("a"), MESH.layout("a"))(x)
