"""Operands whose blocks overlap: halos, and whatever else a line of a program reads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor.layouts.errors import LayoutError, PlanError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate, Shard, Spans, parse_placement
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.notation.core import Halo
from fdtensor.plans.planner import plan
from fdtensor.runtime.interpreter import run
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.connect import connect
from fdtensor.tensors.distribution import distribute, from_local
from fdtensor.testing.strategies import layouts, meshes
from fdtensor.testing.values import block, full_tensor, scatter


@st.composite
def spans(draw, dim, size, count):
    """Ranges of a dim for each index of an axis, which may overlap, leave holes or be none."""
    held = []
    for _ in range(count):
        ends = sorted(draw(st.lists(st.integers(0, size), min_size=4, max_size=4)))
        pairs = [(a, b) for a, b in (ends[:2], ends[2:]) if a < b]
        if len(pairs) == 2 and pairs[0][1] == pairs[1][0]:
            pairs = [(pairs[0][0], pairs[1][1])]
        held.append(tuple(pairs))
    return Spans(dim, tuple(held))


@st.composite
def halos(draw, world=None):
    """A type and one that reads overlapping ranges of the same tensor."""
    mesh = draw(meshes(max_axes=2, max_ranks=6, world=world))
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    src = TensorType(shape, torch.int64, draw(layouts(mesh, shape, partial=("sum",))))
    dims = list(range(len(shape)))
    placements = []
    for size in mesh.sizes:
        dim = draw(st.sampled_from([None, *dims])) if size > 1 else None
        if dim is None:
            placements.append(Replicate())
        else:
            dims.remove(dim)
            placements.append(draw(spans(dim, shape[dim], size)))
    return src, src.with_layout(Layout(mesh, placements))


@given(halos(), st.integers(0, 99))
def test_every_rank_gets_the_ranges_that_it_reads(ends, seed):
    src, dst = ends
    full = full_tensor(src, seed)
    found, comm = plan(src, dst), SimulatedComm(src.mesh)

    made = run(found, scatter(full, src, seed), comm)

    found.verify()
    announced = {rank: found.received_bytes_at(rank) for rank in src.mesh.order}
    assert {rank: comm.received[rank] for rank in announced} == announced
    assert found.received_bytes == max(announced.values())
    for rank, local in zip(src.mesh.ranks, made, strict=True):
        assert torch.equal(local, block(full, dst, rank))
    if not src.layout.partial:
        assert found.received_bytes == found.lower_bound_bytes


@pytest.mark.mesh
@settings(max_examples=settings.default.max_examples // 6)
@given(halos(world=4), st.integers(0, 99))
def test_every_real_rank_gets_the_ranges_that_it_reads(pool4, ends, seed):
    for rank, local in enumerate(pool4.run(_read, *ends, seed)):
        src, dst = ends
        if src.mesh.position(rank) is not None:
            assert torch.equal(local, block(full_tensor(src, seed), dst, rank))


def _read(src, dst, seed):
    comm = connect(Mesh(world=4))
    place = src.mesh.position(comm.rank)
    blocks = scatter(full_tensor(src, seed), src, seed)
    local = torch.zeros(0, dtype=torch.int64) if place is None else blocks[place]
    return run(plan(src, dst), local, comm)


def test_a_halo_moves_and_nothing_else():
    """Rows of 16 elements on 4 ranks: one from each neighbor."""
    mesh = Mesh(x=4)
    src = TensorType((32, 4), torch.float32, Layout(mesh, [Shard(0)]))
    halo = Halo(0, 32, lambda start, stop: (start - 1, stop + 1)).of(32, 4)
    assert halo == Spans(0, (((0, 9),), ((7, 17),), ((15, 25),), ((23, 32),)))

    found = plan(src, Layout(mesh, [halo]))

    assert [found.received_bytes_at(rank) for rank in range(4)] == [16, 32, 32, 16]


def test_what_needs_its_own_block_only_is_a_shard():
    assert Halo(1, 7, lambda start, stop: (start, stop)).of(7, 4) == Shard(1)
    assert Halo(0, 2, lambda start, stop: (start, stop)).of(2, 4) == Shard(0)


def test_overlapping_blocks_are_only_read():
    mesh, x = Mesh(x=2), torch.arange(4)
    halo = Layout(mesh, [Spans(0, (((0, 3),), ((1, 4),)))])
    type = TensorType((4,), torch.int64, halo)
    assert eval(repr(halo)) == halo
    assert str(type) == "i64[4@x 0:3 1:4]"
    with pytest.raises(PlanError, match="nothing moves away"):
        plan(type, mesh.layout())
    with pytest.raises(LayoutError, match="blocks that overlap"):
        distribute(x, halo, SimulatedComm(mesh))
    with pytest.raises(LayoutError, match="blocks that overlap"):
        from_local((x[:3], x[1:]), type, SimulatedComm(mesh))
    with pytest.raises(LayoutError, match="reach beyond dim 0"):
        TensorType((3,), torch.int64, halo)
    with pytest.raises(LayoutError, match="1 sizes"):
        Layout(mesh, [Spans(0, (((0, 3),),))])
    with pytest.raises(LayoutError, match="has one rank"):
        Layout(Mesh(x=1), [Spans(0, (((0, 3),),))])


@given(st.data())
def test_ranges_are_read_back_as_they_print(data):
    placement = data.draw(spans(data.draw(st.integers(0, 2)), 9, data.draw(st.integers(2, 4))))
    assert parse_placement(str(placement)) is placement


@pytest.mark.parametrize(
    "held", [((3, 1),), ((0, 2), (2, 4)), ((2, 4), (0, 1)), ((-1, 2),), ((0,),), 3]
)
def test_ranges_that_touch_or_go_back_are_refused(held):
    with pytest.raises(LayoutError, match="ascending ranges"):
        Spans(0, ((), held))
