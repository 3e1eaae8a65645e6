"""What depends on the values of tensors: refused by `spmd` with the line that asks for them."""

import warnings

import pytest
import torch

from fdtensor import (
    DataDependentError,
    DTensor,
    FallbackWarning,
    SimulatedComm,
    call,
    connect,
    distribute,
    gradients,
    spmd,
    trace,
)
from fdtensor.layouts.mesh import Mesh
from fdtensor.testing.pool import GlooPool

MESH = Mesh(x=2, y=2)
X = torch.arange(6.0).reshape(2, 3)


class Clipped(torch.autograd.Function):
    """The identity, whose backward looks at the cotangent."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad if grad.abs().max() < 10 else grad / 10  # the backward asks


def by_condition(x):
    return x if x.sum() > 3 else x + 1


def by_item(x):
    return x * x.max().item()


def by_mask(x):
    return x[x > 2].sum()


def by_list(x):
    return torch.tensor(x.tolist())


def by_numpy(x):
    return torch.from_numpy(x.detach().numpy() + 1)


def by_size(x):
    return torch.ones(int(x[0, 1])).sum() + x


def by_unique(x):
    return torch.unique(x).sum()


def by_equality(x):
    return x + torch.equal(x, x)


def by_float(x):
    return x * float(f"{x.sum():.1f}")


def by_iteration(x):
    return sum(v for v in x[0] if v > 0) + x


def by_gradient(x):
    y = x.clone().requires_grad_()
    return torch.autograd.grad(Clipped.apply(y).sum(), y)[0]


def by_transform(x):
    return torch.func.grad(lambda x: Clipped.apply(x).sum())(x)


ASKS = {
    by_condition: "if x.sum() > 3",
    by_item: "x.max().item()",
    by_mask: "x[x > 2]",
    by_list: "x.tolist()",
    by_numpy: "x.detach().numpy()",
    by_size: "int(x[0, 1])",
    by_unique: "torch.unique(x)",
    by_equality: "torch.equal(x, x)",
    by_float: "x.sum():.1f",
    by_iteration: "if v > 0",
    by_gradient: "# the backward asks",
    by_transform: "# the backward asks",
}
"""Functions, each with a part of the line that asks for a value."""


def laid(comm=None, layout=None):
    return distribute(X, layout or MESH.layout("x", "y"), comm or SimulatedComm(MESH))


@pytest.mark.parametrize("f", ASKS, ids=lambda f: f.__name__)
def test_spmd_names_the_line_that_asks_for_a_value(f):
    x = laid()
    for run in (spmd(f), spmd(f).trace, lambda x: trace(f, x)):
        with pytest.raises(DataDependentError) as raised:
            run(x)
        line = raised.value.facts["line"]
        assert "test_data_dependent.py:" in line
        assert ASKS[f] in line
    assert not x.comm.calls, "nothing was sent"


def test_the_error_says_what_to_do():
    with pytest.raises(DataDependentError) as raised:
        spmd(by_item)(laid())
    assert str(raised.value).replace(raised.value.facts["line"], "<line>") == REFUSED


REFUSED = """\
f32[] is asked for its value, by .item(), float(), if or the like, which a traced function does \
not know.

  line: <line>

Use torch.where, masks or sizes that are known, or return the tensor and look at it outside; \
`call` and spmd(f, on_data_dependent="replicate") run all of it on replicas."""


@pytest.mark.parametrize("copy", [torch.tensor, torch.as_tensor, torch.asarray])
def test_a_tensor_of_a_list_of_tensors_is_a_stack(copy):
    for f in (lambda x: copy([x[0, 0], x[1, 1]]), lambda x: copy([[x[0, 0], 1.0]])):
        with pytest.raises(DataDependentError, match=f"{copy.__name__} of a list") as raised:
            spmd(f)(laid())
        assert raised.value.hint.startswith("Write torch.stack([...])")
        assert torch.equal(call(f, laid()).full(), f(X))
    assert torch.equal(
        spmd(lambda x: x + copy([[1.0], [2.0]]))(laid()).full(), X + copy([[1], [2]])
    )


def test_a_backward_that_asks_is_refused_at_the_call():
    x = laid().requires_grad_()
    with pytest.raises(DataDependentError) as raised:
        spmd(Clipped.apply)(x)
    assert "# the backward asks" in raised.value.facts["line"]
    assert spmd(Clipped.apply)(x.detach()).full().equal(X), "without derivatives nobody asks"


def test_a_backward_that_asks_runs_on_replicas_where_that_is_wanted():
    x = laid().requires_grad_()
    with pytest.warns(FallbackWarning, match="runs on replicated operands"):
        y = spmd(Clipped.apply, on_data_dependent="replicate")(x)
    (y.full() * 30).sum().backward()
    assert torch.equal(gradients(x).full(), torch.full((2, 3), 3.0))


@pytest.mark.parametrize("f", [f for f in ASKS if f not in (by_transform, by_gradient)])
def test_call_runs_it_on_replicas(f):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(call(f, laid()).full(), f(X))


def test_the_fallback_says_so_once_and_keeps_the_layouts_of_arguments():
    def step(params, x):
        scale = x.sum().item()
        return {name: p - scale for name, p in params.items()}, x.sum()

    comm = SimulatedComm(MESH)
    params = {"w": laid(comm), "b": laid(comm, MESH.layout("y"))}
    run = spmd(step, on_data_dependent="replicate")
    with pytest.warns(FallbackWarning, match=r"x\.sum\(\)\.item\(\)") as told:
        after, total = run(params, params["w"])
    run(after, params["w"])  # warnings are errors
    run({"w": params["w"]}, params["w"])  # another program, for the same reason
    assert len(told) == 1
    assert told[0].filename == __file__
    assert {name: p.layout for name, p in after.items()} == {
        name: p.layout for name, p in params.items()
    }
    assert total.layout is MESH.layout()
    assert torch.equal(after["b"].full(), X - X.sum())


def test_libraries_are_told_that_they_are_compiled():
    """So that they leave out warnings and shortcuts that look at values."""

    def careful(x, mask):
        if not torch.compiler.is_compiling() and mask.all():
            return x
        return torch.where(mask, x, -1)

    x = laid()
    assert spmd(careful)(x, call(torch.gt, x, 2)).full().equal(torch.where(X > 2, X, -1))
    assert not torch.compiler.is_compiling()


def refused_on_a_rank():
    comm = connect(MESH)
    for f in (by_item, by_gradient):
        with pytest.raises(DataDependentError):
            spmd(f)(laid(comm))
    x = spmd(torch.relu)(laid(comm))
    return isinstance(x, DTensor)


@pytest.mark.mesh
def test_all_ranks_refuse_together_and_go_on(pool4: GlooPool):
    assert pool4.run(refused_on_a_rank) == [True] * 4
