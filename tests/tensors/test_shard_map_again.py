"""Functions in `shard_map` that run again, as they write to tensors that all ranks have alike."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fdtensor import Mesh, distribute, random, shard_map, spmd
from fdtensor.collectives import axis_index, psum
from fdtensor.errors import CommError, TraceError
from fdtensor.runtime.simulator import SimulatedComm

MESH = Mesh(x=4)
CUT = MESH.layout("x")
X = torch.arange(24.0).reshape(12, 2)
GIVEN = distribute(X, CUT, SimulatedComm(MESH))


def mapped(f):
    return shard_map(f, MESH, CUT, CUT)


def first_row(x):
    """A tensor that the function makes, to which it writes what differs from rank to rank."""
    out = torch.zeros(3, 2)
    out[0] = x[0]
    return out


def test_it_draws_the_same_numbers():
    def draws(x, written):
        drawn = torch.rand(3, 2)
        return drawn + 0 * (written(x) if written else x)

    def before_others(written):
        def f(x):
            own = mapped(lambda x: draws(x, written))(x)
            return torch.stack([own, torch.rand(12, 2)])

        return spmd(f)(GIVEN, key=random.key(3)).full()

    assert torch.equal(before_others(first_row), before_others(None))


@pytest.mark.parametrize("write", [lambda t: t.add_(1), lambda t: t.view(1)[0].fill_(3)])
def test_no_tensor_from_around_is_written_to_twice(write):
    def f(x, written):
        count = torch.zeros(())

        def own(x):
            write(count)
            return written(x) + count

        return mapped(own)(x), count * 1

    one = torch.zeros(())
    write(one)
    got, count = spmd(lambda x: f(x, lambda x: x))(GIVEN)
    assert torch.equal(count.full(), one)
    assert torch.equal(got.full(), X + one)
    with pytest.raises(TraceError, match="writes to a tensor from around it"):
        spmd(lambda x: f(x, first_row))(GIVEN)


def test_what_is_its_own_may_be_written_to_before():
    def f(x, y):
        x.mul_(2)
        made = torch.ones(2)
        made[0] = 5
        y.add_(made)
        return first_row(x) + y

    def plain(x, y):
        return torch.cat([f(own.clone(), y.clone()) for own in x.chunk(4)])

    y = torch.ones(3, 2)
    whole = distribute(y, MESH.layout(), GIVEN.comm)
    both = shard_map(f, MESH, (CUT, MESH.layout()), CUT)
    assert torch.equal(spmd(lambda x, y: both(x, y))(GIVEN, whole).full(), plain(X, y))


def test_an_array_beside_a_write_is_taken():
    array = np.ones((3, 2), dtype=np.float32)
    f = mapped(lambda x: first_row(x) + torch.from_numpy(array))
    wanted = torch.cat([first_row(own) + 1 for own in X.chunk(4)])
    assert torch.equal(spmd(lambda x: f(x))(GIVEN).full(), wanted)
    f = mapped(lambda x: torch.from_numpy(array).copy_(x))
    with pytest.raises(TraceError, match="one for all ranks"):
        spmd(lambda x: f(x))(GIVEN)


def by_place(x):
    y = x * x[axis_index("x") % 3]
    y[axis_index("x") % 3] = psum(x.sum(0), "x")
    return y * x


def checkpointed(f):
    return lambda x: checkpoint(f, x, use_reentrant=False)


@pytest.mark.parametrize("of", [spmd, lambda f: f], ids=["traced", "op by op"])
def test_a_checkpoint_is_of_the_whole_function(of):
    gradients = []
    for f in (mapped(by_place), checkpointed(mapped(by_place))):
        x = GIVEN.detach().requires_grad_()
        of(lambda x, f=f: f(x).square().sum())(x).backward()
        gradients.append(x.grad.full())
    assert torch.equal(*gradients)
    x = GIVEN.detach().requires_grad_()
    with pytest.raises(CommError, match=r"(?s)outside of shard_map.*of what shard_map gives"):
        of(mapped(checkpointed(by_place)))(x).sum().backward()
