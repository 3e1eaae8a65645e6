"""Random ops of torch on real ranks: the numbers of one process, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from fdtensor import CommError, DTensor, Mesh, SimulatedComm, connect, distribute, random, spmd

MESH = Mesh(dp=2, tp=2)
KEY = random.key(3)
DIMS = [(), ("dp",), (None, "tp"), ("tp", "dp"), (None, ("tp", "dp"))]
X = torch.arange(35.0, dtype=torch.float64).reshape(5, 7)


def noisy(x):
    kept = F.dropout(x, 0.4) + torch.rand_like(x) + torch.empty_like(x).normal_(0, 2)
    return kept * torch.randperm(7), torch.bernoulli(x, 0.5)


def drawn(comm):
    """Results and derivatives for each layout."""
    found = []
    function = spmd(noisy)
    for dims in DIMS if comm.mesh == MESH else [()]:
        x = distribute(X, comm.mesh.layout(*dims), comm)
        values = [out.full() for out in function(x, key=KEY)]
        grads = spmd(torch.func.grad(lambda x: noisy(x)[0].square().sum()))(x, key=KEY)
        found.append([*values, grads.full()])
    return found


def on_ranks():
    comm = connect(MESH)
    x = distribute(X, MESH.layout("dp"), comm)
    y = DTensor(x.local.clone().requires_grad_(), x.type, comm)
    spmd(lambda x: F.dropout(x, 0.5).sum())(y, key=KEY).local.backward()
    told = None
    try:
        spmd(noisy)(x, key=random.key(comm.rank))
    except CommError as error:
        told = str(error)
    return drawn(comm), DTensor(y.local.grad, x.type, comm).full(), told


@pytest.mark.mesh
def test_real_ranks_draw_what_one_process_draws(pool4):
    alone = SimulatedComm(Mesh(one=1))
    ((*values, grads),) = drawn(alone)
    x = distribute(X, alone.mesh.layout(), alone)
    kept = spmd(lambda x: F.dropout(torch.ones_like(x), 0.5))(x, key=KEY).full()
    for found, backward, told in pool4.run(on_ranks):
        for outs in found:
            for a, b in zip(outs, values, strict=False):
                assert torch.equal(a, b)
            torch.testing.assert_close(outs[-1], grads)
        assert torch.equal(backward, kept)
        assert told is not None
        assert told.startswith("the ranks do not agree on this key.\n\n  rank 0: ")
