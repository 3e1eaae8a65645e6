"""Numbers that ranks do not have alike, of a step or a draw, are told where values leave."""

import pytest
import torch

from fdtensor import CommError, Mesh, TensorType, connect, distribute, optim, random

pytestmark = pytest.mark.mesh

ROWS = Mesh(x=2).layout("x")


def stepped(params, one):
    opt = optim.SGD(lr=0.2 if one else 0.1)
    return opt.step(params, params, opt.init(params))[0]["w"]


def stepped_at(params, one):
    opt = optim.SGD(lr=1.0)
    return opt.step(params, params, opt.init(params), lr=0.2 if one else 0.1)[0]["w"]


def clipped(params, one):
    return optim.clip_grad_norm(params, 0.5 if one else 1.0)[0]["w"]


def clipped_by_another_norm(params, one):
    return optim.clip_grad_norm(params, 1.0, 1.0 if one else 2.0)[0]["w"]


def drawn(params, one):
    key = random.key(int(one))
    return random.uniform(key, TensorType((4,), torch.float32, ROWS), params["w"].comm)


def dropped(params, one):
    return random.dropout(random.key(int(one)).tensor(), params["w"])


def tossed(params, one):
    return random.bernoulli(random.key(int(one)), params["w"] * 0.5, (4,)).float()


def on_rank(act, differs):
    comm = connect(Mesh(x=2))
    params = {"w": distribute(torch.ones(4), ROWS, comm)}
    try:
        return act(params, differs and comm.rank == 1).full().tolist()
    except CommError:
        return "told"


@pytest.mark.parametrize(
    "act", [stepped, stepped_at, clipped, clipped_by_another_norm, drawn, dropped, tossed]
)
def test_numbers_that_differ_are_told_on_all_ranks(gloo_ranks, act):
    pool = gloo_ranks(2)
    same = pool.run(on_rank, act, False)
    assert same[0] == same[1] != "told"
    assert pool.run(on_rank, act, True) == ["told", "told"]
    assert pool.run(on_rank, act, False) == same
