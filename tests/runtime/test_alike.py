"""`check="values"`: what ranks are said to hold alike is compared bit by bit; replicas of types."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fdtensor as fd
from fdtensor.errors import CommError
from fdtensor.layouts.placement import Replicate
from fdtensor.runtime.alike import replicas
from fdtensor.runtime.interpreter import run
from fdtensor.testing import types

MESH = fd.Mesh(x=2, y=3)


@st.composite
def held(draw) -> tuple[fd.TensorType, list[torch.Tensor]]:
    """A type and blocks for it, whole numbers, those of replicas the same."""
    type = draw(types(MESH, (4, 6)))
    blocks = [torch.zeros(type.local_shape(r), dtype=torch.int64) for r in MESH.order]
    sets = [*replicas(type), *([r] for r in MESH.order if all(r not in s for s in replicas(type)))]
    for number, ranks in enumerate(sets):
        for rank in ranks:
            blocks[rank] += number
    return type, blocks


@given(held())
def test_replicas_are_the_ranks_that_differ_in_replicated_axes_alone(pair):
    type, _ = pair
    places = zip(MESH.axes, type.layout.placements, strict=True)
    cuts = [axis for axis, placement in places if not isinstance(placement, Replicate)]
    coords = {rank: dict(zip(MESH.axes, MESH.coord(rank), strict=True)) for rank in MESH.order}
    keys = {rank: tuple(coord[axis] for axis in cuts) for rank, coord in coords.items()}
    sets = {tuple(r for r in MESH.order if keys[r] == key) for key in keys.values()}
    assert set(replicas(type)) == {ranks for ranks in sets if len(ranks) > 1}


@given(held(), st.data())
def test_one_bit_of_a_replica_is_seen_before_anything_runs(pair, data):
    type, blocks = pair
    comm = fd.SimulatedComm(MESH, check="values")
    plan = fd.plans.plan(type, MESH.layout())
    run(plan, tuple(blocks), comm)
    told = [rank for ranks in replicas(type) for rank in ranks if blocks[rank].numel()]
    if not told:
        return
    rank = data.draw(st.sampled_from(told))
    place = data.draw(st.integers(0, blocks[rank].numel() - 1))
    blocks[rank].flatten()[place] ^= 1 << data.draw(st.integers(0, 62))
    calls = comm.calls.copy()
    with pytest.raises(CommError, match="different values of what this plan takes") as raised:
        run(plan, tuple(blocks), comm)
    assert f"rank {rank}" in str(raised.value)
    assert comm.calls == calls


def test_what_a_function_closes_over_and_draws_from_is_compared():
    comm = fd.SimulatedComm(fd.Mesh(x=2), check="values")
    x = fd.distribute(torch.ones(4), comm.mesh.layout(), comm)
    step = fd.spmd(lambda x: x + 1)
    assert step(x).full().tolist() == [2.0] * 4
    x.local[1][2] = 7.0
    with pytest.raises(CommError, match="input 0, f32") as raised:
        step(x)
    assert raised.value.facts == {"input 0, f32[4]": "rank 0 | rank 1"}


def each_its_own(check: str) -> str:
    """What this rank is told of a tensor that no other rank has."""
    comm = fd.connect(fd.Mesh(x=4), check=check)
    type = fd.TensorType((3,), torch.float32, comm.mesh.layout())
    x = fd.from_local(torch.full((3,), float(comm.rank == 2)), type, comm, check="always")
    try:
        return str(fd.call(torch.neg, x).local.tolist())
    except CommError as error:
        return str(error)


@pytest.mark.mesh
def test_real_ranks_compare_values(pool4):
    texts = set(pool4.run(each_its_own, "values"))
    assert len(texts) == 1
    assert "rank 2" in texts.pop()
    assert len(set(pool4.run(each_its_own, "always"))) == 2
