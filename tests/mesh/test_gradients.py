"""Norms, scales and optimizers on real ranks: all have the same answer, and step together."""

from math import inf

import pytest
import torch

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Ragged, Shard, StridedShard
from fdtensor.tensors.connect import connect
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.grad_norms import (
    clip_grad_norm,
    clip_grad_norm_,
    found_inf,
    gradients,
    local_tensors,
    total_norm,
)
from fdtensor.tensors.scaling import GradScaler
from fdtensor.tensors.spmd import spmd

pytestmark = pytest.mark.mesh

SQUARE = Mesh(dp=2, tp=2)
SOME = Mesh.from_ranks([3, 1], "x")
LAYOUTS = [
    SQUARE.layout(),
    SQUARE.layout("tp", "dp"),
    Layout(SQUARE, [Shard(0), StridedShard(0, 2)]),
    Layout(SQUARE, [Ragged(1, (0, 3)), Shard(0)]),
    SQUARE.layout("dp", partial={"tp": "sum"}),
    SOME.layout("x"),
    SOME.layout(),
]


def fulls():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in LAYOUTS]


def norms_here(bad):
    comm = connect(Mesh(world=4))
    made = [distribute(f, layout, comm) for f, layout in zip(fulls(), LAYOUTS)]
    if bad is not None and comm.rank == 3:
        made[bad].local.view(-1)[-1] = inf
    clipped, norm = clip_grad_norm(made, 1.0)
    answers = norm.item(), total_norm(made, inf).item(), total_norm(made, 1.0).item()
    return answers, found_inf(made), total_norm(clipped).item()


@pytest.mark.parametrize("bad", [None, 1, 4, 5, 6])
def test_all_ranks_have_the_same_answers(pool4, bad):
    found = pool4.run(norms_here, bad)
    assert len({repr(f) for f in found}) == 1
    (norms, bad_found, after) = found[0]
    assert bad_found == (bad is not None)
    if bad is None:
        whole = torch.cat(fulls())
        for p, norm in zip((2, inf, 1), norms):
            assert norm == pytest.approx(torch.linalg.vector_norm(whole, p).item(), rel=1e-12)
        assert after == pytest.approx(1.0, rel=1e-5)


def loss_of(params, x):
    return (torch.tanh(x @ params["a"]) @ params["b"]).square().sum()


def trained_here(bad_steps):
    comm = connect(SQUARE)
    generator = torch.Generator().manual_seed(1)
    full = {
        "a": torch.randn(5, 6, generator=generator),
        "b": torch.randn(6, 3, generator=generator),
    }
    to = {"a": SQUARE.layout(None, ("tp", "dp")), "b": SQUARE.layout("tp")}
    x = torch.randn(7, 5, generator=generator)
    here = distribute(x, SQUARE.layout("dp"), comm)
    params = {k: distribute(v, to[k], comm).requires_grad_() for k, v in full.items()}
    plain = {k: v.clone().requires_grad_() for k, v in full.items()}
    ours = torch.optim.AdamW(local_tensors(params), lr=0.1)
    theirs = torch.optim.AdamW(plain.values(), lr=0.1)
    scaler = GradScaler(comm, init_scale=64.0)
    other = torch.amp.GradScaler("cpu", init_scale=64.0)
    step = spmd(loss_of)
    for i in range(4):
        ours.zero_grad()
        theirs.zero_grad()
        scaler.scale(step(params, here).full()).backward()
        other.scale(loss_of(plain, x)).backward()
        if i in bad_steps:
            plain["a"].grad[0, 0] = inf
            if comm.rank == i:
                params["a"].local.grad.view(-1)[-1] = inf
        scaler.unscale_(ours)
        other.unscale_(theirs)
        if i not in bad_steps:
            clip_grad_norm_(params, 1.0)
            torch.nn.utils.clip_grad_norm_(plain.values(), 1.0)
        scaler.step(ours)
        other.step(theirs)
        scaler.update()
        other.update()
    close = [torch.allclose(params[k].full(), plain[k], rtol=1e-4, atol=1e-5) for k in params]
    sizes = [t.numel() for t in local_tensors(params)]
    held = [v["exp_avg"].numel() for v in ours.state.values()]
    return all(close), scaler.get_scale() == other.get_scale(), held == sizes, sum(sizes)


@pytest.mark.parametrize("bad_steps", [(), (1,), (0, 2, 3)])
def test_training_with_scaled_losses_is_that_of_one_process(pool4, bad_steps):
    for close, scales, held, size in pool4.run(trained_here, bad_steps):
        assert close
        assert scales
        assert held
        assert size < 5 * 6 + 6 * 3


def unlike_here():
    comm = connect(SQUARE)
    made = [distribute(f, SQUARE.layout("tp"), comm) for f in fulls()]
    try:
        total_norm(made[: 2 + (comm.rank == 2)])
    except CommError as error:
        return error.sentence


def test_other_trees_are_refused_by_all(pool4):
    found = pool4.run(unlike_here)
    assert found == ["the ranks do not agree on total_norm."] * 4


def unused_here():
    comm = connect(SQUARE)
    params = [distribute(f, SQUARE.layout("tp"), comm).requires_grad_() for f in fulls()[:2]]
    params[0].full().sum().backward()
    return gradients(params)[1], gradients(params)[0].type == params[0].type


def test_what_no_rank_uses_has_no_gradient(pool4):
    assert pool4.run(unused_here) == [(None, True)] * 4
