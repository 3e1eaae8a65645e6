"""No gradient is lost in silence: of what a function closes over, of ops without a derivative."""

import gc
import operator
import weakref

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fdtensor as fd
from fdtensor import (
    FallbackWarning,
    Mesh,
    NotTorchError,
    TraceError,
    call,
    connect,
    distribute,
    spmd,
)
from tests.support.depth import times

MESH = Mesh(dp=2, tp=2)
COMM = connect(MESH)
LAYOUTS = [(), ("dp",), (None, "tp"), ("tp", "dp")]

SMOOTH = {"square": lambda x: (x * x).sum(0), "sin": torch.sin, "double": lambda x: 2 * x}
BROKEN = {
    "floor": lambda x: x // 2,
    "heaviside": lambda x: torch.heaviside(x - 3, torch.ones(())) * x,
    "after": lambda x: (x // 2).sum() * x,
}
EVERY = {**SMOOTH, **BROKEN}


def numbers(*dims):
    full = torch.arange(16.0).view(4, 4)
    return full.clone().requires_grad_(), distribute(
        full, MESH.layout(*dims), COMM
    ).requires_grad_()


@settings(max_examples=times(12, 300))
@given(
    names=st.lists(st.sampled_from(sorted(EVERY)), min_size=2, max_size=4),
    dims=st.sampled_from(LAYOUTS),
    read=st.sets(st.integers(0, 3), min_size=1),
    how=st.sampled_from(["spmd", "call"]),
)
def test_a_result_without_derivative_leaves_the_others_theirs(names, dims, read, how):
    """As in torch: an error comes where a gradient comes to it, and no sooner."""

    def f(x):
        return tuple(EVERY[name](x) for name in names)

    full, x = numbers(*dims)
    g = spmd(f) if how == "spmd" else lambda x: call(f, x)
    some = [i for i in sorted(read) if i < len(names)]
    assume(some and any(name in SMOOTH for name in names))
    results = g(x)
    assert all(result.requires_grad for result in results)
    loss = sum(results[i].sum() for i in some)
    if any(names[i] in BROKEN for i in some):
        for _ in range(2):
            with pytest.raises(TraceError, match=r"derivative for .* is not implemented"):
                loss.backward(retain_graph=True)
        assert x.grad is None
    else:
        loss.backward()
        sum(f(full)[i].sum() for i in some).backward()
        assert torch.equal(x.grad.full(), full.grad)


def test_a_function_of_which_no_result_has_a_derivative_is_refused():
    _, x = numbers("dp")
    with pytest.raises(TraceError, match="heaviside is not implemented"):
        spmd(BROKEN["heaviside"])(x)


def test_what_is_closed_over_gets_a_gradient_or_a_word():
    weight = torch.ones(4, requires_grad=True)
    _, x = numbers("dp")
    f = spmd(lambda x: x * weight)
    with pytest.raises(TraceError, match=r"of shape \(4,\), and would give it no gradient"):
        f(x)
    with pytest.warns(FallbackWarning, match="gives it no gradient") as said:
        results = [f(x.detach()) for _ in range(2)]
    assert len(said) == 1
    assert not any(result.requires_grad for result in results)
    with torch.no_grad():
        spmd(lambda x: x * weight)(x)
    constant = weight.detach()
    assert spmd(lambda x: x * constant)(x).requires_grad


@pytest.mark.parametrize(
    "f",
    [
        lambda w: lambda x: x * w.detach(),
        lambda w: torch.no_grad()(lambda x: x * w),
        lambda w: lambda x: (x * w).argmax(),
        lambda w: lambda x: torch.func.grad(lambda row: (row * w.detach()).sum())(x),
        lambda w: lambda x: torch.nn.Parameter((x * w).detach()),
        lambda w: lambda x: fd.scan(lambda c, row: (c * row, c), w.detach(), x)[0],
    ],
    ids=["detach", "no_grad", "argmax", "grad", "leaf", "scan"],
)
def test_no_word_where_the_function_takes_no_gradient_itself(f):
    weight = torch.arange(4.0, requires_grad=True)
    full, x = numbers("dp")
    result = spmd(f(weight))(x.detach())
    assert torch.equal(result.full().detach(), f(weight)(full.detach()).detach())


@pytest.mark.parametrize(
    "f",
    [
        lambda w: lambda x: w,
        lambda w: lambda x: torch.vmap(lambda row: row * w)(x),
        lambda w: lambda x: torch.func.grad(lambda row: (row * row * w).sum())(x),
        lambda w: lambda x: fd.scan(lambda c, row: (c + row * w, c), x[0], x)[0],
        lambda w: lambda x: torch.cond(x.sum() > 0, lambda x: x * w, lambda x: x + w, (x,)),
        lambda w: lambda x: x.clone().mul_(w),
        lambda w: lambda x: spmd(lambda x: x * w)(x),
    ],
    ids=["itself", "vmap", "grad", "scan", "cond", "in place", "inner"],
)
def test_a_word_however_it_is_used(f):
    weight = torch.arange(4.0, requires_grad=True)
    _, x = numbers("dp")
    with pytest.raises(TraceError, match="would give it no gradient"):
        spmd(f(weight))(x)
    with pytest.warns(FallbackWarning, match="gives it no gradient"):
        spmd(f(weight))(x.detach())


def test_what_requires_grad_after_the_first_call_gets_a_word_too():
    """As a layer that is no longer frozen."""
    weight = torch.ones(4)
    _, x = numbers("dp")
    f = spmd(lambda x: x * weight)
    f(x), f(x.detach())
    weight.requires_grad_()
    with pytest.raises(TraceError, match="would give it no gradient"):
        f(x)
    with pytest.warns(FallbackWarning, match="gives it no gradient"):
        f(x.detach())
    with torch.no_grad():
        f(x)


def test_an_error_of_a_backward_keeps_nothing_alive():
    _, x = numbers("dp")
    f = spmd(lambda x: ((x * x).sum(), (x // 2) * x))

    def fails():
        mine = torch.ones(3)
        loss, half = f(x)
        with pytest.raises(TraceError, match="not implemented"):
            (loss + half.sum()).backward()
        return weakref.ref(mine)

    kept = fails()
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("name", ["iadd", "isub", "imul", "itruediv", "ipow"])
def test_a_parameter_is_not_left_behind_by_an_augmented_assignment(name):
    """`p -= lr * p.grad` would give the name `p` another tensor, and train nothing."""
    _, x = numbers("dp")
    change = getattr(operator, name)
    for context in (torch.no_grad(), torch.enable_grad()):
        with context, pytest.raises(NotTorchError, match=r"would leave this leaf .* as it is"):
            change(x, 2)
    y = x * 1
    assert torch.equal(change(y, 2).full(), change(x.full() * 1, 2))
    z = x.detach()
    assert torch.equal(change(z, 2).full(), change(x.full().detach(), 2))
    assert torch.equal(z.full(), x.full())
