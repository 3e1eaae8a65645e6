"""Tests of ops of lists: of several meshes, of fused optimizers; and of what requires grad."""

import pytest
import torch
import torch.nn.functional as F

from fdtensor import Mesh, SimulatedComm, call, distribute, spmd, trace
from fdtensor.layouts.errors import CommError, TraceError
from fdtensor.tensors.dtensor import DTensor

LINE, SQUARE = Mesh(a=2), Mesh(a=2, b=2)
ON_LINE, ON_SQUARE = SimulatedComm(LINE), SimulatedComm(SQUARE)
X, Y, Z = torch.arange(4.0), torch.arange(6.0) - 2, torch.ones(2, 2)


def several():
    return [
        distribute(X, LINE.layout("a"), ON_LINE),
        distribute(Y, SQUARE.layout(("b", "a")), ON_SQUARE),
        distribute(Z, LINE.layout(None, "a"), ON_LINE),
    ]


CASES = {
    "norm": (torch._foreach_norm, ()),
    "norm by keyword": (torch._foreach_norm, (), {"ord": 1}),
    "overload": (torch.ops.aten._foreach_norm.Scalar, (2,)),
    "scalar": (torch._foreach_mul, (2.0,)),
    "scalars": (torch._foreach_add, ([1.0, 2.0, 3.0],)),
    "lists": (torch._foreach_add, ("lists",)),
    "in place": (torch._foreach_mul_, (3.0,)),
}


@pytest.mark.parametrize(("f", "rest", "named"), [(*c, {})[:3] for c in CASES.values()], ids=CASES)
def test_an_op_of_lists_takes_each_mesh_on_its_own(f, rest, named):
    plain = [X.clone(), Y.clone(), Z.clone()]
    expected = f(plain, *[plain if r == "lists" else r for r in rest], **named)
    given = several()
    found = call(f, given, *[given if r == "lists" else r for r in rest], **named)
    assert [d.comm for d in found] == [d.comm for d in given]
    for d, e in zip(found, expected, strict=True):
        torch.testing.assert_close(d.full(), e)
    for d, e in zip(given, (X, Y, Z)):  # a DTensor never changes
        torch.testing.assert_close(d.full(), e)


def test_an_op_of_lists_that_pair_two_meshes_is_refused():
    given = several()
    with pytest.raises(CommError, match="another Comm"):
        call(torch._foreach_add, given, given[::-1][1:] + given[:1])


FUSED = [
    (torch._fused_adam_, 4, {"beta1": 0.9, "beta2": 0.99, "amsgrad": False, "eps": 1e-8}),
    (torch._fused_adamw_, 4, {"beta1": 0.9, "beta2": 0.99, "amsgrad": False, "eps": 1e-8}),
    (torch._fused_adagrad_, 3, {"lr_decay": 0.0, "eps": 1e-8}),
]


@pytest.mark.parametrize(("f", "states", "options"), FUSED, ids=["adam", "adamw", "adagrad"])
@pytest.mark.parametrize("way", ["spmd", "call"])
def test_the_step_of_a_fused_optimizer_is_refused_by_name(f, states, options, way):
    """Not with words about closed-over tensors, of which there are none."""
    x, step = several()[0], distribute(torch.tensor(1.0), LINE.layout(), ON_LINE)
    lists = [[x]] * states + ([[]] if states == 4 else []) + [[step]]
    run = spmd(f) if way == "spmd" else lambda *args, **kwargs: call(f, *args, **kwargs)
    with pytest.raises(TraceError, match=f"{f.__name__} steps all parameters") as error:
        run(*lists, lr=0.1, weight_decay=0.0, maximize=False, **options)
    assert "fdtensor.optim" in str(error.value)


MAKERS = {
    "new_zeros": lambda x: x.new_zeros(3, requires_grad=True),
    "new_full": lambda x: x.new_full((3,), 2.0, requires_grad=True),
    "zeros_like": lambda x: torch.zeros_like(x, requires_grad=True),
    "ones": lambda x: (x * 2, torch.ones(2, requires_grad=True)),
    "detached": lambda x: x.detach().requires_grad_(),
    "parameter": lambda x: {"w": torch.nn.Parameter(x * 2), "y": x * 3},
    "derived": lambda x: x * 2,
    "itself": lambda x: x,
    "detached again": lambda x: (x * 2, (x * 2).detach(), x.detach() * 3),
}


@pytest.mark.parametrize("f", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("way", ["spmd", "call", "quick call"])
def test_what_a_function_makes_to_require_grad_does(f, tracked, way):
    x = distribute(X.clone(), LINE.layout("a"), ON_LINE).requires_grad_(tracked)
    expected = torch.utils._pytree.tree_leaves(f(X.clone().requires_grad_(tracked)))
    run = spmd(f) if way == "spmd" else lambda x: call(f, x)
    found = run(x)
    if way == "quick call":
        found = run(x)
    found = torch.utils._pytree.tree_leaves(found, is_leaf=lambda d: isinstance(d, DTensor))
    for d, e in zip(found, expected, strict=True):
        assert {t.requires_grad for t in d.local} == {e.requires_grad}
        if e.requires_grad and f is not MAKERS["itself"]:
            assert {t.is_leaf for t in d.local} == {e.is_leaf}


def test_a_new_leaf_gets_its_gradient():
    x = distribute(X, LINE.layout("a"), ON_LINE)
    w = call(lambda x: torch.ones_like(x, requires_grad=True), x)
    call(lambda w, x: (w * x).sum(), w, x).full().backward()
    assert [t.grad.tolist() for t in w.local] == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_total_that_nobody_reads_is_not_reduced(reduction, weighted):
    """The backward of nll_loss takes the sum of weights, and reads it for a mean alone."""
    mesh = Mesh(dp=4)
    weight = torch.rand(16) if weighted else None

    def loss(x, t, *weights):
        return F.nll_loss(x, t, *weights, reduction=reduction).sum()

    x, t = torch.randn(8, 16).log_softmax(1), torch.randint(0, 16, (8,))
    comm = SimulatedComm(mesh)
    given = [distribute(x, mesh.layout("dp"), comm), distribute(t, mesh.layout("dp"), comm)]
    given += [distribute(weight, mesh.layout(), comm)] if weighted else []
    step = torch.func.grad(loss)
    assert trace(step, *given, check_indices=False).received_bytes == 0
    torch.testing.assert_close(
        spmd(step)(*given).full(), step(x, t, *([weight] if weighted else []))
    )
