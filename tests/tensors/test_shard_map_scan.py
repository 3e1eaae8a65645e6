"""`shard_map` in a step of `fd.scan`: closures, derivatives, checkpoints, beside torch."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fdtensor as fd
from fdtensor import Mesh, distribute, func, shard_map, spmd, trace
from fdtensor.collectives import ppermute, psum
from fdtensor.runtime.simulator import SimulatedComm

MESH = Mesh(x=4)
COMM = SimulatedComm(MESH)
CUT = MESH.layout("x")
STEPS = 5
AROUND = [(i, (i + 1) % 4) for i in range(4)]

ring = shard_map(lambda u, k: ppermute(u * k, "x", AROUND) + psum(u.sum(), "x"), MESH, CUT, CUT)


def plain(u, k):
    return torch.roll(u * k, 2) + u.sum()


def in_carry(step, u, k):
    """Both are carried."""
    carried = fd.scan(lambda c, _: ((step(*c), c[1]), c[0].cos()), (u, k), None, STEPS)
    return carried[0][0], carried[1]


def in_closure(step, u, k):
    return fd.scan(lambda c, _: (step(c, k), c.cos()), u, None, STEPS)


def by_entry(step, u, k):
    entries = torch.stack([k * (i + 1) for i in range(STEPS)])
    return fd.scan(lambda c, e: (step(c, e), c.cos()), u, entries)


def kept_not(step, u, k):
    def one(c, _):
        return checkpoint(lambda c: step(c, k), c, use_reentrant=False), c.cos()

    return fd.scan(one, u, None, STEPS)


WAYS = {"carry": in_carry, "closure": in_closure, "entries": by_entry, "checkpoint": kept_not}


def loss(way, step):
    def f(u, k):
        end, each = WAYS[way](step, u, k)
        return (end**2).sum() + each.sum()

    return f


def values():
    u = torch.arange(1.0, 9.0, dtype=torch.float64) / 8
    return u, u.flip(0) / 2 + 0.1


@pytest.mark.parametrize("way", [*WAYS])
def test_a_step_gives_what_torch_gives(way):
    given = [distribute(t, CUT, COMM) for t in values()]
    wanted = WAYS[way](plain, *values())
    for ours, theirs in zip(spmd(lambda u, k: WAYS[way](ring, u, k))(*given), wanted, strict=True):
        torch.testing.assert_close(ours.full(), theirs)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "checkpoint"])
def test_derivatives_are_those_of_torch(way):
    given = [distribute(t, CUT, COMM) for t in values()]
    wanted = torch.func.grad(loss(way, plain), (0, 1))(*values())
    for ours, theirs in zip(func.grad(loss(way, ring), (0, 1))(*given), wanted, strict=True):
        torch.testing.assert_close(ours.full(), theirs)


@pytest.mark.parametrize("way", [*WAYS])
def test_a_backward_gives_what_torch_gives(way):
    leaves = [t.requires_grad_() for t in values()]
    loss(way, plain)(*leaves).backward()
    given = [distribute(t, CUT, COMM).requires_grad_() for t in values()]
    spmd(loss(way, ring))(*given).backward()
    for ours, theirs in zip(given, leaves, strict=True):
        torch.testing.assert_close(ours.grad.full(), theirs.grad)


def test_a_loop_has_its_lines_once():
    u, k = (distribute(t, CUT, COMM) for t in values())
    program = trace(lambda u, k: in_closure(ring, u, k)[0], u, k)
    assert str(program).count("exchange[") == 1
    assert program.received_bytes == STEPS * (2 * 8 + 2 * 8 * 3 // 4)
