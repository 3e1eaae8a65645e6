"""What is recorded at a backward sees the settings of torch, and the values, of its call."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from fdtensor import Mesh, call, connect, distribute, spmd
from fdtensor.errors import TraceError

MESH = Mesh(dp=2, tp=2)
SCALE = 2.0


@contextlib.contextmanager
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def bfloat16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def cast(w, x):
    h = x @ w
    return (h * (1 if h.dtype == torch.bfloat16 else 100)).float().square().sum(), h.sum()


def half(w, x):
    h = torch.tanh(x @ w.bfloat16())  # refused where nothing is cast
    return h.float().square().sum(), h


def by_default(w, x):
    h = x * w[0]
    wide = torch.tensor(0.5).dtype == torch.float64
    return (h * (100 if wide else 1)).pow(3).sum(), h.sum()


class Product(torch.autograd.Function):
    """A product whose backward would be cast by autocast."""

    @staticmethod
    def forward(x, w):
        return (x @ w).float()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


def own_backward(w, x):
    y = Product.apply(x, w)
    return y.square().sum(), y.sum()


def arguments():
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(6, 6, generator=generator)
    return w, torch.randn(4, 6, generator=generator)


@pytest.mark.parametrize("apply", [spmd, lambda f: lambda *args: call(f, *args)])
@pytest.mark.parametrize("read", [(0,), (0, 1)])
@pytest.mark.parametrize(
    ("f", "at_call", "at_backward"),
    [
        (cast, bfloat16, contextlib.nullcontext),
        (cast, contextlib.nullcontext, bfloat16),
        (half, bfloat16, contextlib.nullcontext),
        (by_default, contextlib.nullcontext, float64_by_default),
        (by_default, float64_by_default, contextlib.nullcontext),
        (own_backward, bfloat16, contextlib.nullcontext),
    ],
)
def test_a_backward_is_that_of_the_call(apply, read, f, at_call, at_backward):
    w, x = arguments()

    def gradient(w, x, f, around):
        with at_call():
            results = f(w, x)
        total = sum((results[i].sum() for i in read[1:]), results[read[0]].sum())
        with around():
            return torch.autograd.grad(total, [w])[0]

    expected = gradient(w.clone().requires_grad_(), x, f, contextlib.nullcontext)
    comm = connect(MESH)
    args = (
        distribute(w, MESH.layout("dp"), comm).requires_grad_(),
        distribute(x, MESH.layout(None, "tp"), comm),
    )
    for _ in range(2):  # the second time all has been recorded
        torch.testing.assert_close(gradient(*args, apply(f), at_backward).full(), expected)


@pytest.mark.parametrize("f", [cast, by_default])
def test_so_is_one_of_second_order(f):
    w, x = arguments()
    at_call = bfloat16 if f is cast else float64_by_default

    def second(w, x, f):
        with at_call():
            loss, _ = f(w, x)
        (grad,) = torch.autograd.grad(loss, [w], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [w])[0]

    expected = second(w.clone().requires_grad_(), x, f)
    comm = connect(MESH)
    own = distribute(w, MESH.layout("dp"), comm).requires_grad_()
    grad = second(own, distribute(x, MESH.layout(None, "tp"), comm), spmd(f))
    torch.testing.assert_close(grad.full(), expected, rtol=1e-2, atol=1e-2)


def test_a_value_that_has_changed_since_the_call_is_an_error(monkeypatch):
    module = torch.nn.Dropout()

    def scaled(w, options):
        h = w * (SCALE if module.training else 1.0) * options.scale
        return h.sum(), h

    def starts(change, undo):
        options = SimpleNamespace(scale=1.0)
        w = distribute(arguments()[0], MESH.layout("dp"), connect(MESH)).requires_grad_()
        loss, _ = spmd(scaled)(w, options)
        change(options)
        with pytest.raises(TraceError) as error:
            loss.backward()
        undo()
        return str(error.value).partition(".\n")[0]

    told = (
        "spmd('scaled') is recorded once more for this derivative, and {} has changed since the "
        "call"
    )
    name = f"{__name__}.SCALE"
    own = starts(lambda _: monkeypatch.setattr(name, 3.0), lambda: monkeypatch.undo())
    assert own == told.format("SCALE")
    own = starts(lambda _: module.eval(), lambda: module.train())
    assert own == told.format("module.training")
    own = starts(lambda options: setattr(options, "scale", 2.0), lambda: None)
    assert own == told.format("argument 1")


@pytest.mark.parametrize("second", [False, True])
def test_a_tensor_that_was_written_to_since_the_call_is_an_error(second):
    factor = torch.ones(6)

    def scaled(w):
        h = w * w * factor * torch.tensor(2.0)
        return (h.sum(), h) if not second else h.sum()

    w = distribute(arguments()[0], MESH.layout("dp"), connect(MESH)).requires_grad_()
    for changes in (False, True):
        result = spmd(scaled)(w)
        loss = result if second else result[0]
        if changes:
            factor.mul_(100)
            with pytest.raises(TraceError, match=r"of shape \(6,\) that scaled.* was written to"):
                torch.autograd.grad(loss, [w], create_graph=second)
        else:
            torch.autograd.grad(loss, [w], create_graph=second)


def test_what_a_recording_changes_itself_is_no_change():
    class Counted:
        calls = 0

    def counting(w, counted):
        counted.calls += 1
        return (w * w).sum(), w.exp()

    w = distribute(arguments()[0], MESH.layout("dp"), connect(MESH)).requires_grad_()
    loss, _ = spmd(counting)(w, Counted())
    loss.backward()
    torch.testing.assert_close(w.grad.full(), 2 * arguments()[0])
