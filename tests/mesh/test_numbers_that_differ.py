"""Numbers and programs that ranks do not have alike: errors of all ranks name what differs."""

import pytest
import torch

from fdtensor import CommError, Mesh, TensorType, connect, distribute, optim, random, spmd

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
    except CommError as error:
        return str(error)


NUMBERS = {
    stepped: ("SGD: 0.1", "SGD: 0.2"),
    stepped_at: ("SGD: 0.1", "SGD: 0.2"),
    clipped: (": 1.0, 2.0", ": 0.5, 2.0"),
    clipped_by_another_norm: (": 1.0, 2.0", ": 1.0, 1.0"),
    drawn: ("0, 0", "0, 1"),
    dropped: ("0, 0", "0, 1"),
    tossed: ("0, 0", "0, 1"),
}


@pytest.mark.parametrize("act", NUMBERS, ids=lambda act: act.__name__)
def test_numbers_that_differ_are_told_on_all_ranks(gloo_ranks, act):
    pool = gloo_ranks(2)
    same = pool.run(on_rank, act, False)
    assert same[0] == same[1]
    assert isinstance(same[0], list)
    one, other = pool.run(on_rank, act, True)
    assert one == other
    assert all(number in one for number in NUMBERS[act])
    assert pool.run(on_rank, act, False) == same
    told = pool.run(on_rank, act, True)  # compared later: each rank has had this one before
    assert told[0] == told[1]
    assert all(number in told[0] for number in NUMBERS[act])


def another_number(params, one):
    return spmd(lambda x: (x.exp() * (3 if one else 2)).sum())(params["w"])


def another_op(params, one):
    return spmd(lambda x: (x.cos() if one else x.sin()).sum())(params["w"])


def a_line_more(params, one):
    return spmd(lambda x: x.exp().sin() if one else x.exp())(params["w"])


def another_shape_of_many(params, one):
    trees = [torch.ones(7 if one and i == 40 else 8) for i in range(60)]
    return distribute(trees, ROWS, params["w"].comm)[0]


PROGRAMS = {
    another_number: ("mul.Tensor b 2 at call", "mul.Tensor b 3 at call"),
    another_op: (" = sin a at call", " = cos a at call"),
    a_line_more: ("out b at call", " = sin b at call"),
    another_shape_of_many: ("TensorType((8,)", "TensorType((7,)"),
}


@pytest.mark.parametrize("act", PROGRAMS, ids=lambda act: act.__name__)
def test_what_ranks_do_not_have_alike_is_shown(gloo_ranks, act):
    pool = gloo_ranks(2)
    one, other = pool.run(on_rank, act, True)
    assert one == other
    assert all(f"rank {rank}: " in one for rank in (0, 1))
    assert all(line in one for line in PROGRAMS[act])
    assert len(one) < 1500
    same = pool.run(on_rank, act, False)
    assert same[0] == same[1]
    assert not isinstance(same[0], str)
