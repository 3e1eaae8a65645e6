"""Counts of what ranks hold and lack, in closed form, beside those by the indices of each rank."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fdtensor import Layout, Mesh, Shard, StridedShard, TensorType
from fdtensor.layouts.blocks import intersect, length
from fdtensor.layouts.placement import Replicate
from fdtensor.plans import counts
from fdtensor.plans.normal_type import normalized


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
