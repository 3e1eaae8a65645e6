"""Counts of what ranks hold and lack, in closed form, beside those by the indices of each rank."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fdtensor import Layout, Mesh, Shard, StridedShard, TensorType
from fdtensor.layouts.blocks import intersect, length
from fdtensor.layouts.placement import Replicate
from fdtensor.plans import counts
from fdtensor.plans.movement import movement
from fdtensor.plans.normal_type import normalized
from fdtensor.plans.routes import route
from fdtensor.testing.strategies import redistributions


@st.composite
def cut(draw, mesh, size):
    """A type of one dim that some of the axes cut, in any order."""
    axes = draw(st.permutations(mesh.axes))[: draw(st.integers(0, mesh.ndim))]
    kinds = st.sampled_from([Shard(0), *(StridedShard(0, n) for n in (2, 3, 4, 6))])
    placements = [draw(kinds) if axis in axes else Replicate() for axis in mesh.axes]
    layout = Layout(mesh, placements, {0: axes})
    return normalized(TensorType((size,), torch.float32, layout))


@st.composite
def pairs(draw):
    mesh = Mesh(**dict(zip("abc", draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))))
    size = draw(st.sampled_from([24, 48, 72, 96, 144, 288, 576, 60, 7]))
    return draw(cut(mesh, size)), draw(cut(mesh, size))


def every_rank(mesh):
    return [mesh.coord(rank) for rank in mesh.order]


@given(pairs())
def test_what_ranks_hold_is_counted_as_their_indices(pair):
    a, b = pair
    held, both = counts.numel(a), counts._common_numel(a, b)
    for coord in every_rank(a.mesh):
        at = tuple(i if n > 1 else 0 for i, n in zip(coord, held.shape))
        assert held[at] == length(a.indices(0, coord))
        at = tuple(i if n > 1 else 0 for i, n in zip(coord, both.shape))
        assert both[at] == length(intersect(a.indices(0, coord), b.indices(0, coord)))


@given(pairs())
def test_even_cuts_are_counted_without_indices(pair):
    a, b = pair
    assume(counts._units(a, b, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "table", None)
        counts._common_numel(a, b)


@given(
    st.booleans().flatmap(lambda cross: redistributions(cross_mesh=cross)),
    st.sampled_from([0, counts.SMALL]),
)
def test_what_ranks_receive_is_what_is_sent_to_them(pair, small):
    """On one mesh or between two, in ints of any size or of 64 bits."""
    moves = movement(*pair)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "SMALL", small)
        counted = counts.to_receive.__wrapped__(moves)
    kind = np.int64 if small else np.object_
    assert np.asarray(counted).dtype == kind or not pair[1].mesh.ndim
    numbers = np.ravel(np.broadcast_to(counted, pair[1].mesh.sizes)).tolist()
    for number, rank in zip(numbers, pair[1].mesh.order, strict=True):
        assert number == sum(message.numel for message in route(moves, rank).recvs)


@pytest.mark.parametrize("dims", [("b", "a"), (("b", "a"), None), (None, "b")])
def test_a_million_ranks_are_counted_at_once(dims, monkeypatch):
    """Between meshes of other shapes, by arrays of all ranks: no rank is asked alone."""
    src, dst = Mesh(dp=1024, tp=1024), Mesh(a=512, b=2048)
    monkeypatch.setattr(counts, "table", None)
    monkeypatch.setattr(Mesh, "coord", None)
    before = TensorType((1 << 20, 1 << 20), torch.float32, src.layout("dp", "tp"))
    after = TensorType((1 << 20, 1 << 20), torch.float32, dst.layout(*dims))
    held = after.numel // (512 * 2048 if "a" in str(dims) else 2048)
    received = counts.to_receive.__wrapped__(movement(before, after))
    assert counts.most(received) in range(held - before.numel // 1024**2, held + 1)
