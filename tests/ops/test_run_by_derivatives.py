"""What a derivative runs in Python is recorded as the rest: checkpoints, hooks, custom ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import fdtensor as fd
from fdtensor import Mesh, SimulatedComm, distribute, spmd

MESH = Mesh(a=2, b=2)
COMM = SimulatedComm(MESH)
LAYOUTS = st.sampled_from([MESH.layout(), MESH.layout(("b", "a")), MESH.layout("a", "b")])
X = torch.linspace(-1, 2, 24, dtype=torch.float64).reshape(4, 6)


def written(x, j):
    y = x * 2
    y[j] = x.sum(0)
    return y * x


def branch(condition, of_true, of_false, operands):
    """That of torch, which compiles it elsewhere than in a traced function."""
    if torch.compiler.is_compiling():
        return torch.cond(condition, of_true, of_false, operands)
    return (of_true if condition else of_false)(*operands)


RECORDED_OTHERWISE = {
    "a row": lambda x, j: x * x[j],
    "a column": lambda x, j: x * x.select(1, j)[:, None],
    "a part": lambda x, j: x[:2] * x.narrow(0, j % 3, 2),
    "a write": written,
    "a branch": lambda x, j: branch(j > 0, lambda x: x * x, lambda x: x.sin(), (x,)),
    "one_hot": lambda x, j: x.square() * torch.nn.functional.one_hot(j % 6, 6),
    "a loop": lambda x, j: fd.scan(lambda c, row: (c * row + x[j], c), x[0], x)[0],
}
"""Functions of torch that read values, or take functions, and are recorded as other ops."""


def in_checkpoint(f):
    return lambda x, j: checkpoint(f, x, j, use_reentrant=False)


def pulled(f, x, j, cotangent):
    return torch.func.vjp(lambda x: f(x, j), x)[1](cotangent)[0], None


def with_derivative(f):
    class Known(torch.autograd.Function):
        @staticmethod
        def forward(x, j):
            return f(x, j)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, cotangent):
            return pulled(f, *ctx.saved_tensors, cotangent)

    return Known.apply


def with_derivative_by_context(f):
    class Known(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, j):
            ctx.save_for_backward(x, j)
            return f(x, j)

        @staticmethod
        def backward(ctx, cotangent):
            return pulled(f, *ctx.saved_tensors, cotangent)

    return Known.apply


WAYS = [in_checkpoint, with_derivative, with_derivative_by_context]


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=6)
@given(name=st.sampled_from(sorted(RECORDED_OTHERWISE)), layout=LAYOUTS, j=st.integers(-2, 1))
def test_what_a_derivative_runs_is_recorded_as_the_rest(way, name, layout, j):
    plain, j = RECORDED_OTHERWISE[name], torch.tensor(j)
    f = way(plain)
    x = distribute(X, layout, COMM).requires_grad_()
    spmd(lambda x, j: f(x, j).square().sum())(x, distribute(j, MESH.layout(), COMM)).backward()
    torch.testing.assert_close(x.grad.full(), gradient(plain, X, j))


def test_a_hook_is_recorded_as_the_rest():
    def hooked(x, j):
        y = x * 2
        y.register_hook(lambda cotangent: cotangent * cotangent[j])
        return y

    f = spmd(lambda x, j: gradient(hooked, x, j))
    j = torch.tensor(-1)
    found = f(distribute(X, MESH.layout("a"), COMM), distribute(j, MESH.layout(), COMM))
    torch.testing.assert_close(found.full(), gradient(hooked, X, j))


@given(layout=LAYOUTS, j=st.integers(-2, 1))
@settings(max_examples=4)
def test_a_loop_in_a_loop_reads_places_of_the_outer_one(layout, j):
    def inner(x, i):
        return fd.scan(lambda c, row: (c * row + x[i], c), x[0], x)[0]

    def nested(x, j):
        return fd.scan(lambda c, i: (c * inner(x, i - j), c), x[1], torch.arange(2))[0]

    def unrolled(x, j):
        return x[1] * inner(x, -j) * inner(x, 1 - j)

    x, j = distribute(X, layout, COMM).requires_grad_(), torch.tensor(j)
    spmd(lambda x, j: nested(x, j).square().sum())(x, distribute(j, MESH.layout(), COMM)).backward()
    torch.testing.assert_close(x.grad.full(), gradient(unrolled, X, j))


def gradient(f, x, j):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(f(x, j).square().sum(), x)[0]
