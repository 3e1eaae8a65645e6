"""`shard_map` inside of a traced function on real ranks, beside what one writes by hand."""

import math

import pytest
import torch
import torch.distributed as dist

from fdtensor import func
from fdtensor.layouts.mesh import Mesh
from fdtensor.programs.tracer import trace
from fdtensor.tensors.connect import connect
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.shard_map.collectives import all_to_all, psum
from fdtensor.tensors.shard_map.mapped import shard_map
from fdtensor.tensors.spmd import spmd
from tests.tensors.test_shard_map_traced import (
    EVEN,
    MESH,
    STEPS,
    attention,
    function,
    ring_attention,
    sequences,
)

pytestmark = pytest.mark.mesh

LINE = Mesh(x=4)


def each_step():
    """What each collective gives inside, alone, and the largest difference."""
    comm = connect(MESH)
    a = (torch.arange(64.0, dtype=torch.float64).reshape(8, 8) % 5) - 2
    worst = {}
    for k, name in enumerate(sorted(STEPS)):
        taken = EVEN[3 + k % 4]
        alone = shard_map(
            function([(name, "tp", k % 2), (name, ("dp", "tp"), 0)]),
            MESH,
            taken,
            (MESH.layout("dp", "tp"), MESH.layout()),
        )
        x = distribute(a, MESH.layout("tp"), comm)
        pairs = zip(spmd(lambda a, b, f=alone: f(a, b))(x, x), alone(x, x), strict=True)
        worst[name] = max((p.full() - q.full()).abs().max().item() for p, q in pairs)
    return worst


def test_each_collective_gives_what_it_gives_alone(pool4):
    for worst in pool4.run(each_step):
        assert set(worst.values()) == {0.0}


def model(attend):
    return lambda q, k, v: torch.relu(q + attend(q * 2, k, v)).square().sum()


def by_ring():
    """The loss of a layer of ring attention and its gradients, the bytes announced."""
    comm = connect(LINE)
    cut = LINE.layout(None, None, "x")
    args = [distribute(t, cut, comm) for t in sequences()]
    loss = model(shard_map(ring_attention, LINE, cut, cut))
    grads, value = func.grad_and_value(loss, (0, 1, 2))(*args)
    scalar = LINE.layout(partial={"x": "sum"})
    nbytes = trace(loss, *args, out_layouts=scalar).received_bytes
    return [g.full() for g in grads], value.item(), nbytes


def by_hand():
    """The same loss as messages between processes, and the bytes that this one receives."""
    rank, ranks = dist.get_rank(), 4
    q, k, v = (t.chunk(ranks, 2)[rank].contiguous() for t in sequences())
    q2, block, received = q * 2, q.shape[2], 0
    rows = rank * block + torch.arange(block)
    scores, values = [], []
    for step in range(ranks):
        columns = (rank - step) % ranks * block + torch.arange(block)
        s = q2 @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores.append(torch.where(rows[:, None] >= columns, s, -math.inf))
        values.append(v)
        if step < ranks - 1:
            ahead, behind = (rank + 1) % ranks, (rank - 1) % ranks
            both = torch.stack([k, v])
            came = torch.empty_like(both)
            ops = [dist.P2POp(dist.isend, both, ahead), dist.P2POp(dist.irecv, came, behind)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            k, v = came
            received += came.nbytes
    out = torch.softmax(torch.cat(scores, -1), -1) @ torch.cat(values, 2)
    total = torch.relu(q + out).square().sum()
    dist.all_reduce(total)
    return total.item(), received


def test_ring_attention_is_that_of_one_process_with_the_bytes_of_hand_written_code(pool4):
    wanted, value = torch.func.grad_and_value(model(attention), (0, 1, 2))(*sequences())
    by_hands = pool4.run(by_hand)
    for (grads, loss, nbytes), (total, received) in zip(pool4.run(by_ring), by_hands, strict=True):
        torch.testing.assert_close(grads, list(wanted))
        assert loss == pytest.approx(value.item(), rel=1e-12)
        assert total == pytest.approx(value.item(), rel=1e-12)
        assert nbytes <= received


def experts(tokens, up, down):
    """Each rank has an expert; token i of a block goes to expert i % 4, and comes back."""
    sorted_ = tokens.view(-1, 4, tokens.shape[-1]).transpose(0, 1)
    there = all_to_all(sorted_, "x", 0, 0)
    done = torch.relu(there @ up[0]) @ down[0]
    back = all_to_all(done, "x", 0, 0).transpose(0, 1).reshape(tokens.shape)
    return back, psum(back.square().sum(), "x")


def weights():
    tokens = torch.arange(32 * 4.0, dtype=torch.float64).reshape(32, 4).sin()
    up = torch.arange(4 * 4 * 6.0, dtype=torch.float64).reshape(4, 4, 6).cos()
    return tokens, up, torch.arange(4 * 6 * 4.0, dtype=torch.float64).reshape(4, 6, 4).sin()


def plain_experts(tokens, up, down):
    each = tokens.view(8, 4, 4).transpose(0, 1)
    done = (torch.relu(each @ up) @ down).transpose(0, 1).reshape(tokens.shape)
    return done, done.square().sum()


def mixture():
    comm = connect(LINE)
    rows = LINE.layout("x")
    args = [distribute(t, rows, comm) for t in weights()]
    mapped = shard_map(experts, LINE, rows, (rows, LINE.layout()))

    def loss(tokens, up, down):
        out, total = mapped(tokens + 1, up, down)
        return (out * 3).sum() + total

    grads, value = func.grad_and_value(loss, (0, 1, 2))(*args)
    one = trace(lambda *a: mapped(*a)[0], *args, out_layouts=rows)
    return [g.full() for g in grads], value.item(), one.received_bytes


def test_a_mixture_of_experts_sends_tokens_there_and_back(pool4):
    def loss(tokens, up, down):
        out, total = plain_experts(tokens + 1, up, down)
        return (out * 3).sum() + total

    wanted, value = torch.func.grad_and_value(loss, (0, 1, 2))(*weights())
    block = 32 * 4 * 8 // 4
    for grads, found, nbytes in pool4.run(mixture):
        torch.testing.assert_close(grads, list(wanted))
        assert found == pytest.approx(value.item(), rel=1e-12)
        assert nbytes == 2 * block * 3 // 4
