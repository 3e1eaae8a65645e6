"""`fd.vmap` with an axis of its own around `shard_map`: each rank has its entries alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fdtensor as fd
from fdtensor import Mesh, TensorType, distribute, func, shard_map, trace
from fdtensor.collectives import axis_index
from fdtensor.errors import LayoutError
from fdtensor.runtime.simulator import SimulatedComm
from tests.tensors.test_shard_map_traced import MESH, STEPS, bodies, function, pmean, psum

few = settings(max_examples=settings.default.max_examples // 4)

WIDE = {
    at: Mesh(**sizes)
    for at, sizes in {
        0: {"ens": 2, "dp": 2, "tp": 2},
        1: {"dp": 2, "ens": 2, "tp": 2},
    }.items()
}
ENTRIES = 4


def entries():
    a = (torch.arange(256.0, dtype=torch.float64).reshape(ENTRIES, 8, 8) % 7) - 3
    return a, (a + 2) % 3 - 1


def mapped(steps, mesh):
    """The function on all entries, with their dim cut, and on one."""
    cut = mesh.layout("dp", "tp")
    one = shard_map(function(steps), mesh, cut, (cut, mesh.layout()))
    return fd.vmap(one, spmd_axis_name="ens"), one


@few
@given(bodies, st.sampled_from([*WIDE]))
def test_each_entry_is_what_it_is_alone(steps, place):
    mesh = WIDE[place]
    many, one = mapped(steps, mesh)
    comm = SimulatedComm(mesh)
    given_ = [distribute(t, mesh.layout("ens", "dp", "tp"), comm) for t in entries()]
    got = [x.full() for x in many(*given_)]
    for n, (a, b) in enumerate(zip(*entries(), strict=True)):
        alone = one(*[distribute(t, mesh.layout("dp", "tp"), comm) for t in (a, b)])
        for ours, wanted in zip(got, alone, strict=True):
            assert torch.equal(ours[n], wanted.full())


def received(f, mesh, shape, *dims):
    x = TensorType(shape, torch.float64, mesh.layout(*dims, "dp", "tp"))
    outs = x.layout, mesh.layout(*dims)
    return trace(f, x, x, choice="follow", out_layouts=outs).received_bytes


@pytest.mark.one_of("axis")
@pytest.mark.parametrize("name", [*STEPS])
@pytest.mark.parametrize("axis", ["dp", ("tp", "dp")])
@pytest.mark.parametrize("place", [*WIDE])
def test_a_rank_receives_for_its_own_entries(name, axis, place):
    steps = [(name, axis, 1)]
    many, _ = mapped(steps, WIDE[place])
    cut = MESH.layout("dp", "tp")
    plain = shard_map(function(steps), MESH, cut, (cut, MESH.layout()))
    own = received(lambda a, b: plain(a, b), MESH, (8, 8))
    of_all = received(many, WIDE[place], (ENTRIES, 8, 8), "ens")
    assert of_all <= own * ENTRIES // 2


def test_derivatives_and_maps_around():
    mesh = WIDE[0]
    cut, comm = mesh.layout("dp"), SimulatedComm(mesh)
    inner = shard_map(lambda v: v - pmean(v.mean(0, keepdim=True), "dp"), mesh, cut, cut)
    x = torch.rand(3, ENTRIES, 8, 2, dtype=torch.float64)
    given_ = distribute(x, mesh.layout(None, "ens", "dp"), comm)

    def around(x):
        return fd.vmap(fd.vmap(inner, spmd_axis_name="ens"))(x)

    def plain(x):
        return x - x.mean(2, keepdim=True)

    torch.testing.assert_close(around(given_).full(), plain(x))
    grad = func.grad(lambda x: (around(x) ** 3).sum())(given_)
    torch.testing.assert_close(grad.full(), torch.func.grad(lambda x: (plain(x) ** 3).sum())(x))


@pytest.mark.parametrize("f", [lambda v: psum(v, "ens"), lambda v: v * axis_index("ens")])
def test_the_axis_of_the_map_is_none_of_the_ranks(f):
    mesh = WIDE[0]
    cut = mesh.layout("dp")
    x = distribute(entries()[0], mesh.layout("ens", "dp"), SimulatedComm(mesh))
    with pytest.raises(LayoutError, match="cuts the dim of a vmap around shard_map"):
        fd.vmap(shard_map(f, mesh, cut, cut), spmd_axis_name="ens")(x)
    cut = mesh.layout("ens")
    with pytest.raises(LayoutError, match="axis 'ens' cannot cut the dim of vmap"):
        fd.vmap(shard_map(lambda v: v, mesh, cut, cut), spmd_axis_name="ens")(x)
