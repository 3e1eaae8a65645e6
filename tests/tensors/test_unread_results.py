"""A result that no loss reads has no cotangent: its way back, which may be infinite, is not run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from fdtensor import Mesh, call, connect, distribute, spmd
from tests.support.depth import times

few = settings(max_examples=times(8, 300))
MESH = Mesh(dp=2, tp=2)
LAYOUTS = [(), ("dp",), (None, "tp"), (("dp", "tp"),), ("tp", "dp")]


def loss_and_more(w, u):
    return (2 * w).sum(), w.sqrt(), u * 3


def norms(w, u):
    return w.norm(), torch.hypot(w, w), (w * u).sum(0), u.amax()


def parts(w, u):
    return *w.split(2), (w + u).unbind()[1], w.pow(0.5).chunk(2, 1)[0]


def moments(w, u):
    return *torch.var_mean(w, 0), torch.linalg.svd(u @ u.mT)[1], u.log()


def values_of_pairs(w, u):
    return *torch.linalg.eigh((w @ w.mT).tril().diagonal().diag_embed()), (u - 2).sqrt()


def checkpointed(w, u):
    h = checkpoint(lambda w, u: (w @ u).tanh() + w.sqrt(), w, u, use_reentrant=False)
    return h.square().sum(), h, h.mean(0), u * w


FUNCTIONS = [loss_and_more, norms, parts, moments, values_of_pairs, checkpointed]


@st.composite
def readings(draw):
    """A function, the layouts of its arguments, and the results that backwards begin at in turn."""
    f = draw(st.sampled_from(FUNCTIONS))
    count = len(f(torch.ones(4, 4).double(), torch.ones(4, 4).double()))
    some = st.sets(st.integers(0, count - 1), min_size=1)
    forwards = draw(st.lists(st.lists(some, min_size=1, max_size=2), min_size=1, max_size=3))
    return f, [draw(st.sampled_from(LAYOUTS)) for _ in range(2)], forwards


def gradients(f, leaves, forwards):
    """The gradients of two leaves after each backward."""
    gathered = []
    for backwards in forwards:
        results = f(*leaves)
        for some in backwards:
            read = sum(results[i].sum() for i in sorted(some))
            unread_too = {"retain_graph": True, "allow_unused": True}
            gathered += torch.autograd.grad(read, leaves, **unread_too)
    return gathered


def arguments():
    w = torch.tensor([[0.0, 1, 4, 0], [1, 1, 0, 9], [0, 0, 1, 4], [2, 0, 3, 1]]).double()
    return w, torch.eye(4).double() * 2 + w.mT


def check(f, layouts, forwards, how, comm):
    full = [t.requires_grad_() for t in arguments()]
    wanted = gradients(f, full, forwards)
    spread = [
        distribute(t.detach(), comm.mesh.layout(*dims), comm).requires_grad_()
        for t, dims in zip(full, layouts)
    ]
    g = {"spmd": spmd(f), "call": lambda *args: call(f, *args), "op by op": f}[how]
    for due, grad in zip(wanted, gradients(g, spread, forwards), strict=True):
        assert (grad is None) == (due is None)
        if due is not None:
            torch.testing.assert_close(grad.full(), due, equal_nan=True)


@pytest.mark.parametrize("how", ["spmd", "call", "op by op"])
@few
@given(drawn=readings())
def test_gradients_are_those_of_torch_whatever_is_read(how, drawn):
    check(*drawn, how, connect(MESH))


def on_rank(how):
    comm = connect(MESH)
    for f in FUNCTIONS:
        check(f, [("dp",), ("tp", "dp")], [[{0}], [{0}, {1}], [{1, 2}]], how, comm)


def on_some_ranks(how):
    """A mesh that leaves out ranks 0 and 2, which go along: the gradients are wanted by all."""
    comm, mesh = connect(Mesh(world=4)), Mesh.from_ranks([3, 1], "x")
    f = {"spmd": spmd(loss_and_more), "call": lambda *args: call(loss_and_more, *args)}[how]
    leaves = [distribute(t, mesh.layout("x"), comm).requires_grad_() for t in arguments()]
    wanted = gradients(loss_and_more, [t.requires_grad_() for t in arguments()], [[{0}], [{0}]])
    for due, grad in zip(wanted, gradients(f, leaves, [[{0}], [{0}]]), strict=True):
        assert (grad is None) == (due is None)
        if due is not None:
            assert torch.equal(grad.redistribute(comm.mesh.layout()).full(), due)


@pytest.mark.mesh
@pytest.mark.parametrize("how", ["spmd", "call"])
def test_ranks_outside_of_a_mesh_have_gradients_of_the_same_inputs(pool4, how):
    pool4.run(on_some_ranks, how, timeout=30)


@pytest.mark.mesh
@pytest.mark.parametrize("how", ["spmd", "call", "op by op"])
def test_and_on_real_ranks(pool4, how):
    pool4.run(on_rank, how)


def test_a_backward_from_the_same_results_runs_what_the_forward_kept():
    """Once it has begun at a loss alone, the next forward is for that."""
    comm = connect(MESH)
    f = spmd(loss_and_more)
    w, u = (distribute(t, MESH.layout("dp"), comm).requires_grad_() for t in arguments())
    runs = []
    for _ in range(3):
        loss, *_ = f(w, u)
        before = sum(comm.received.values())
        loss.backward()
        runs.append(sum(comm.received.values()) - before)
    assert 0 == runs[1] == runs[2] < runs[0]
