"""Whether blocks of a tensor are those of its reshape: by digits of places, and by elements."""

from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import float32

from fdtensor import Layout, Mesh, Replicate, Shard, StridedShard, TensorType
from fdtensor.ops import same_elements as module
from fdtensor.ops.notation.reshape import groups

SHAPES = [(48,), (6, 8), (4, 3, 4), (2, 24), (2, 2, 2, 6), (12, 4), (48, 1)]
MESHES = [Mesh(x=4), Mesh(x=2, y=2), Mesh(x=2, y=3), Mesh(x=2, y=2, z=2), Mesh(x=1, y=4)]


@st.composite
def types(draw, mesh, shape):
    """A type whose dims some axes cut, in any order."""
    placements = {}
    cuts: dict[int, list[str]] = {}
    for axis in draw(st.permutations(mesh.axes)):
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim >= 0:
            parts = draw(st.sampled_from([1, 1, 2, 3, 4]))
            placements[axis] = Shard(dim) if parts == 1 else StridedShard(dim, parts)
            cuts.setdefault(dim, []).append(axis)
    along = [placements.get(axis, Replicate()) for axis in mesh.axes]
    return TensorType(shape, float32, Layout(mesh, along, cuts))


@st.composite
def pairs(draw):
    mesh = draw(st.sampled_from(MESHES))
    src, dst = (draw(types(mesh, draw(st.sampled_from(SHAPES)))) for _ in range(2))
    return src, dst


def by_elements(src, dst):
    """The same, without digits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_digits", lambda type, dims: None)
        return module.same_elements.__wrapped__(src, dst)


@given(pairs())
def test_digits_tell_what_elements_do(pair):
    assert module.same_elements(*pair) == by_elements(*pair)


@given(pairs())
def test_even_cuts_that_are_moved_along_hold_the_same(pair):
    """Where the digits of the source are cut of the result, it holds the same elements."""
    src, _ = pair
    shape = (48,)
    (group,) = groups(src.shape, shape)
    digits = module._digits(src, group[0])
    assume(digits is not None)
    assert prod(r for each in digits.values() for _, r in each) == prod(
        src.mesh.axis_size(axis) for d in group[0] for axis in src.layout.cuts(d)
    )


def test_a_large_mesh_is_told_by_digits(monkeypatch):
    mesh = Mesh(dp=8, fs=16, tp=8)
    src = TensorType((128, 4096, 4096), float32, mesh.layout(("dp", "fs"), "tp"))
    strided = [Shard(0), Shard(0), StridedShard(0, 128 // 128 * 1)]
    dst = TensorType((128 * 4096, 4096), float32, Layout(mesh, strided, {0: ("dp", "fs", "tp")}))
    monkeypatch.setattr(module, "_places", None)
    assert module.same_elements(src, dst)
    rows = TensorType((128 * 4096, 4096), float32, mesh.layout(("tp", "dp", "fs")))
    assert not module.same_elements(src, rows)
