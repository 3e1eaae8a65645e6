"""A step of `fd.scan` that closes over DTensors: derivatives by what it reads there."""

import pytest
import torch

import fdtensor as fd
from fdtensor import Mesh, SimulatedComm, distribute, func, spmd

MESH = Mesh(dp=2)
COMM = SimulatedComm(MESH)
F = torch.nn.functional
W = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.25, 0.0], [-0.5, 1.5, 1.0]], dtype=torch.float64)
X = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 1.0]], dtype=torch.float64)

READS = {
    "mm": lambda h, w: h @ w,
    "from the left": lambda h, w: (w @ h.T).T,
    "mul": lambda h, w: h * w[0] + h.sum() * w.sum(),
    "linear": lambda h, w: F.linear(h, w),
    "einsum": lambda h, w: torch.einsum("ij,jk->ik", h, w),
    "of a view": lambda h, w: h @ w.T + h * w[1],
    "twice": lambda h, w: torch.tanh(h @ w) @ w,
}


def rolled(scan, read):
    """A function of both, by a scan whose step has `w` from around."""

    def f(w, x):
        return scan(lambda h, _: (read(h, w), None), x, None, 3)[0].square().sum()

    return f


def unrolled(f, init, _, length):
    for _ in range(length):
        init, _ = f(init, None)
    return init, None


def hessian_times(transforms, f):
    return lambda w, x: transforms.jvp(transforms.grad(f), (w, x), (w, x))[1]


TRANSFORMS = {
    "grad": lambda t, f: t.grad(f),
    "both": lambda t, f: t.grad(f, (0, 1)),
    "value": lambda t, f: t.grad_and_value(f),
    "jacrev": lambda t, f: t.jacrev(f),
    "jacfwd": lambda t, f: t.jacfwd(f),
    "jvp": lambda t, f: lambda w, x: t.jvp(f, (w, x), (w, x)),
    "vjp": lambda t, f: lambda w, x: t.vjp(f, w, x)[1](f(w, x)),
    "hessian": lambda t, f: t.hessian(f),
    "hessian times": hessian_times,
    "grad of grad": lambda t, f: t.grad(lambda w, x: t.grad(f)(w, x).square().sum()),
}


def given(t, by):
    return distribute(t, MESH.layout(by), COMM)


def full(tree):
    if isinstance(tree, tuple):
        return tuple(map(full, tree))
    return tree.full().detach() if isinstance(tree, fd.DTensor) else tree.detach()


@pytest.mark.one_of("by")
@pytest.mark.parametrize("by", [None, "dp"])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_op_by_op_derivatives_are_those_of_a_loop(name, read, by):
    transform = TRANSFORMS[name]
    expected = transform(torch.func, rolled(unrolled, READS[read]))(W, X)
    given_to = given(W, by), given(X, "dp")
    f = rolled(fd.scan, READS[read])
    torch.testing.assert_close(full(transform(func, f)(*given_to)), full(expected))


@pytest.mark.parametrize("name", ["grad", "jvp", "hessian", "grad of grad"])
def test_so_are_those_of_one_program(name):
    transform = TRANSFORMS[name]
    expected = transform(torch.func, rolled(unrolled, READS["twice"]))(W, X)
    given_to = given(W, "dp"), given(X, "dp")
    f = rolled(fd.scan, READS["twice"])
    for g in (spmd(transform(torch.func, f)), transform(func, spmd(f))):
        torch.testing.assert_close(full(g(*given_to)), full(expected))


@pytest.mark.parametrize("read", READS)
def test_backward_has_them_too(read):
    w, x = (given(t, "dp").detach().requires_grad_() for t in (W, X))
    rolled(fd.scan, READS[read])(w, x).backward()
    expected = torch.func.grad(rolled(unrolled, READS[read]), (0, 1))(W, X)
    torch.testing.assert_close((w.grad.full(), x.grad.full()), expected)
