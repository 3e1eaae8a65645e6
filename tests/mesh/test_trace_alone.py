"""One rank may look at a program while the others compute: nobody waits, nobody parts."""

import pytest
import torch

from fdtensor import Mesh, TraceError, call, connect, distribute, spmd

X = torch.arange(32, dtype=torch.float64).view(8, 4)
W = torch.arange(12, dtype=torch.float64).view(4, 3)


def loss(x, w):
    return torch.relu(x @ w).sum()


def looks(rank):
    mesh = Mesh(all=4)
    comm = connect(mesh)
    x, w = distribute(X, mesh.layout("all"), comm), distribute(W, mesh.layout(), comm)
    w.local.requires_grad_()
    step, lines = spmd(loss), []
    if comm.rank == rank:
        lines = [step.trace(x, w).digest, step.trace_backward(x, w).digest]
        with pytest.raises(TraceError):
            spmd(torch.matmul).trace(x, x)
    between = call(torch.sum, x).full().item()
    value = step(x, w)
    value.backward()
    if comm.rank != rank:
        lines = [step.trace(x, w).digest, step.trace_backward(x, w).digest]
    return lines, between, value.full().item(), w.grad.full()


@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_traces_and_all_compute(pool4, rank):
    w = W.clone().requires_grad_()
    loss(X, w).backward()
    told = pool4.run(looks, rank)
    assert len({tuple(lines) for lines, *_ in told}) == 1
    for _, between, value, gradient in told:
        assert between == X.sum().item()
        assert value == loss(X, W).item()
        torch.testing.assert_close(gradient, w.grad, rtol=0, atol=0)


def differs(rank):
    mesh = Mesh(all=4)
    comm = connect(mesh)
    layout = mesh.layout() if comm.rank == rank else mesh.layout("all")
    x = distribute(X, layout, comm, check="never")
    step = spmd(torch.sum)
    step.trace(x)
    try:
        step(x)
    except Exception as error:
        return str(error)
    return "none"


def test_ranks_whose_programs_differ_are_told_at_the_first_call(pool4):
    told = pool4.run(differs, 1)
    assert all("agree" in text for text in told), told
