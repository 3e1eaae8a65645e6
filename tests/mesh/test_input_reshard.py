"""`input_reshard` on real ranks: gradients, bytes, and what all ranks refuse together."""

import pytest
import torch
from torch import nn

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.mesh import Mesh
from fdtensor.parallel.resharded import input_reshard
from fdtensor.runtime.control.process import group_of
from fdtensor.tensors.connect import connect
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.shard_map.collectives import axis_index, psum
from fdtensor.tensors.shard_map.mapped import shard_map
from tests.parallel.test_input_reshard import (
    Block,
    blocks,
    gradients,
    grads_of,
    kept,
    model,
    wholes,
)

pytestmark = pytest.mark.mesh


def comm_here(**options):
    return connect(Mesh(dp=2, tp=2), **options)


def data(comm, *shape):
    """An input that is the same along tp, and another one along dp."""
    generator = torch.Generator().manual_seed(comm.mesh.coord(comm.rank)[0])
    return torch.randn(*shape, generator=generator).requires_grad_()


class Parallel(nn.Module):
    """A norm, and a product by this rank's columns."""

    def __init__(self, comm):
        super().__init__()
        torch.manual_seed(comm.rank)
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 6 + comm.mesh.coord(comm.rank)[1])

    def forward(self, x):
        return self.up(self.norm(x))


def plain_here(dim, check):
    comm = comm_here()
    own, x = Parallel(comm), data(comm, 5, 7, 8)
    before = gradients(own, x)
    with pytest.MonkeyPatch.context() as patch, kept(patch) as found:
        out = input_reshard(own, comm, axis="tp", dim=dim, check=check)(x)
        out.square().sum().backward(retain_graph=True)
        after = [out, *(source.grad for source in (*own.parameters(), x))]
    same = [torch.equal(a, b) for a, b in zip(after, before, strict=True)]
    held = sum(b.value.nbytes for b in blocks(found))
    return all(same), held, {tuple(t.shape) for t in wholes(found)}, own.up.weight.mT.shape


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("check", [False, True])
def test_gradients_are_the_same_to_the_bit_and_memory_is_shared(pool4, dim, check):
    whole = (5 * 7 * 8 + 5 * 7 * 8 + 2 * 5 * 7) * 4
    found = pool4.run(plain_here, dim, check)
    assert all(same for same, *_ in found)
    for _, held, left, weight in found:
        assert held < (0.7 if dim else 0.65) * whole
        assert left >= {tuple(weight), (8,)}
    assert sum(held for _, held, *_ in found[:2]) <= whole + 2 * 4 * 7


def dtensors_here():
    comm = comm_here()
    block = Block(comm, comm.mesh.layout("dp"))
    before = grads_of(block, False), grads_of(block, True)
    input_reshard(block, comm, axis="tp", dim=0, check=True)
    after = grads_of(block, False), grads_of(block, True)
    with pytest.MonkeyPatch.context() as patch, kept(patch) as found:
        out = block(block.x)
    del out
    same = [torch.equal(a, b) for a, b in zip(after[0][1:], before[0][1:])]
    close = [torch.allclose(a, b, rtol=1e-12) for a, b in zip(after[1][1:], before[1][1:])]
    return all(same) and all(close), len(blocks(found))


def test_dtensors_are_cut_where_they_are_replicated(pool4):
    for same, cut in pool4.run(dtensors_here):
        assert same
        assert cut >= 2


def differing_here(check, columns):
    comm = comm_here()
    own = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6 + columns * comm.rank), nn.Sigmoid())
    torch.manual_seed(comm.rank)
    nn.init.normal_(own[1].weight)
    input_reshard(own, comm, axis="tp", dim=0, check=check)
    x = data(comm, 4, 8)
    try:
        for _ in range(2):
            own(x).sum().backward()
    except CommError as error:
        return str(error)


@pytest.mark.parametrize("check", [False, True])
def test_other_shapes_are_refused_by_all(pool4, check):
    found = pool4.run(differing_here, check, 1)
    assert found == [SHAPES.format(6 + rank) for rank in range(4)]


def test_other_values_are_refused_by_all_where_they_are_compared(pool4):
    assert pool4.run(differing_here, True, 0) == [VALUES] * 4


def failing_here(check):
    comm = comm_here()

    class Failing(nn.Module):
        def forward(self, x):
            if comm.rank == 1:
                raise KeyError("mine alone")
            return x.sin()

    own = input_reshard(Failing(), comm, axis="tp", dim=0, check=check)
    try:
        own(data(comm, 4, 8))
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("check", [False, True])
def test_one_that_fails_leaves_nobody_waiting(pool4, check):
    found = pool4.run(failing_here, check)
    assert [f and f[0] for f in found] == ["CommError", "KeyError", None, None]
    assert "rank 1: KeyError in forward" in found[0][1]


class Sequence(nn.Module):
    """What the ranks of tp scatter among themselves, with collectives of torch."""

    def __init__(self, comm):
        super().__init__()
        coord = comm.mesh.coord(comm.rank)
        ranks = tuple(sorted(comm.mesh.coset(("tp",), coord)))
        self.group = group_of(ranks)

    def forward(self, x):
        ops = torch.ops._c10d_functional
        with torch.no_grad():
            mine = ops.reduce_scatter_tensor(x.contiguous(), "sum", 2, self.group)
            mine = ops.wait_tensor(mine)
        return x.sin().sum() * (mine.requires_grad_() * 2).sin()


def scattered_here():
    comm = comm_here()
    own, x = Sequence(comm), data(comm, 4, 8)
    before = gradients(own, x)
    input_reshard(own, comm, axis="tp", dim=0, check=True)
    with pytest.MonkeyPatch.context() as patch, kept(patch) as found:
        after = gradients(own, x)
    return all(map(torch.equal, before, after)), [b.cut.shape for b in blocks(found)]


def test_what_is_scattered_over_the_axis_is_left_alone(pool4):
    for same, cut in pool4.run(scattered_here):
        assert same
        assert cut == [(4, 8)]


def by_index(x):
    """Another value on each rank, of the same input."""
    return psum((x * (1 + axis_index("tp"))).sin(), "tp")


def mapped_here():
    comm = comm_here()
    whole = comm.mesh.layout()

    class Mapped(nn.Module):
        def forward(self, x):
            return shard_map(by_index, comm.mesh, whole, whole)(x).full()

    x = distribute(torch.linspace(-1, 1, 24).reshape(4, 6), whole, comm).requires_grad_()
    before = torch.autograd.grad(Mapped()(x).sum(), x.local)
    own = input_reshard(Mapped(), comm, axis="tp", dim=0)
    after = torch.autograd.grad(own(x).sum(), x.local)
    return torch.equal(before[0], after[0])


def test_what_shard_map_computes_is_left_alone(pool4):
    assert all(pool4.run(mapped_here))


def copies_here():
    comm = comm_here(check="always")
    own, x = model().double(), torch.randn(3, 7, 8).double()
    expected = gradients(own, x)
    input_reshard(own, comm, axis="dp", dim=1)
    return all(map(torch.equal, gradients(own, x), expected))


def test_the_promise_may_be_of_any_axis(pool4):
    assert all(pool4.run(copies_here))


HINT = (
    "Put input_reshard on modules whose activations are the same on every rank of the axis, such "
    "as norms; it leaves DTensors that are cut alone."
)

SHAPES = f"""\
the ranks along 'tp' keep activations of other shapes for the backward of Sequential.

  this rank: f32[4@tp,8] with strides (8, 1)
             f32[4@tp,1] with strides (1, 1)
             f32[4@tp,1] with strides (1, 1)
             f32[4@tp,8] with strides (8, 1)
             f32[4@tp,{{0}}] with strides ({{0}}, 1)

{HINT}"""

VALUES = f"""\
activation 4 that Sequential keeps for its backward differs along 'tp'.

  activation: f32[4@tp,6] with strides (6, 1)

{HINT}"""
