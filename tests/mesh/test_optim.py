"""Optimizers on real ranks: they step as one process does, and refuse together."""

import pytest
import torch

from fdtensor import optim
from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Ragged, Shard
from fdtensor.tensors.connect import connect
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.grad_norms import clip_grad_norm
from fdtensor.tensors.scaling import LossScale
from fdtensor.tensors.spmd import spmd

pytestmark = pytest.mark.mesh

SQUARE = Mesh(dp=2, tp=2)
TO = {"a": SQUARE.layout(None, ("tp", "dp")), "b": Layout(SQUARE, [Ragged(1, (0, 3)), Shard(0)])}


def fulls():
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (5, 6), "b": (6, 3), "x": (7, 5)}
    return {k: torch.randn(s, generator=generator) for k, s in shapes.items()}


def loss_of(params, x):
    return (torch.tanh(x @ params["a"]) @ params["b"]).square().sum()


def trained_here(name):
    comm = connect(SQUARE)
    full = fulls()
    x = full.pop("x")
    batch = distribute(x, SQUARE.layout("dp"), comm)
    params = {k: distribute(f, TO[k], comm) for k, f in full.items()}
    leaves = {k: f.clone().requires_grad_() for k, f in full.items()}
    opt, theirs = getattr(optim, name)(), getattr(torch.optim, name)(leaves.values())
    state, scale = opt.init(params), LossScale(64.0)
    step = spmd(torch.func.grad(lambda params, x, s: loss_of(params, x) * s))
    for _ in range(3):
        grads, skip = scale.unscaled(step(params, batch, scale.value))
        grads, _ = clip_grad_norm(grads, 1.0)
        params, state = opt.step(params, grads, state)
        scale = scale.after(skip)
        theirs.zero_grad()
        loss_of(leaves, x).backward()
        torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
        theirs.step()
    far = max((params[k].full() - leaves[k]).abs().max().item() for k in params)
    return far, all(params[k].layout is TO[k] for k in params)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "Muon"])
def test_training_is_that_of_one_process(pool4, name):
    for far, kept in pool4.run(trained_here, name):
        assert far < 1e-6
        assert kept


def refused_here():
    comm = connect(SQUARE)
    x = distribute(fulls()["a"], TO["a"], comm)
    opt = optim.AdamW()
    state = opt.init(x)
    try:
        opt.step(x, x, {} if comm.rank == 2 else state)
    except FdtensorError as error:
        return type(error).__name__, error.sentence, error.hint


def test_a_mistake_of_one_rank_is_told_to_all(pool4):
    first, *others = sorted(pool4.run(refused_here))
    about = "a step of AdamW cannot start: rank 2: gradients or state do not fit the parameters"
    assert first[:2] == ("CommError", f"{about} of AdamW.")
    assert first[2] == "Look at what that rank raises; the others stop with it."
    assert others[:2] == [first, first]
    sentence = "gradients or state do not fit the parameters of AdamW."
    assert others[2][:2] == ("ValueTreeError", sentence)


def on_some_ranks_here():
    comm = connect(Mesh(world=4))
    some = Mesh.from_ranks([3, 1], "x")
    full, opt = fulls()["a"], optim.AdamW(lr=0.1)
    params = [distribute(full, layout, comm) for layout in (some.layout("x"), TO["a"])]
    state = opt.init(params)
    for _ in range(2):
        params, state = opt.step(params, params, state)
    rows = params[0].redistribute(TO["a"])
    return torch.equal(rows.local, params[1].local), state[0]["exp_avg"].type.mesh is some


def test_parameters_may_be_on_some_of_the_ranks(pool4):
    assert pool4.run(on_some_ranks_here) == [(True, True)] * 4


def drifting_here():
    comm = connect(SQUARE, check="always")
    x = distribute(fulls()["a"], TO["a"], comm)
    opt = optim.SGD()
    state = opt.init(x)
    x, state = opt.step(x, x, state, lr=0.1)
    try:
        opt.step(x, x, state, lr=0.3 if comm.rank == 1 else 0.2)
    except FdtensorError as error:
        return error.sentence


def test_other_learning_rates_are_refused_where_that_is_checked(pool4):
    found = pool4.run(drifting_here)
    assert found == ["the ranks do not agree on a step of SGD."] * 4


def unlike_here():
    comm = connect(SQUARE)
    x = distribute(fulls()["a"], TO["a"], comm)
    opt = optim.AdamW(weight_decay=0.1 if comm.rank == 1 else 0.2)
    try:
        opt.step(x, x, opt.init(x))
    except FdtensorError as error:
        return error.sentence


def test_other_options_are_refused_by_all(pool4):
    found = pool4.run(unlike_here)
    assert found == ["the ranks do not agree on a step of AdamW."] * 4
