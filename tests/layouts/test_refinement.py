"""One mesh for the layouts of several: its axes, and blocks that stay as they are."""

from itertools import permutations
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from fdtensor import Layout, Mesh, Partial, Ragged, Replicate, Shard, StridedShard, TensorType
from fdtensor.layouts.refinement import refined, seen_on

FACTORS = {4: [(4,), (2, 2), (1, 4)], 6: [(6,), (2, 3), (3, 2)], 8: [(8,), (2, 4), (2, 2, 2)]}
NAMES = "xyz", "abc"


def arranged(names, sizes, order, first=0):
    """A mesh of ranks from `first` on, with the axes of a row-major one in another order."""
    ranks = torch.arange(first, first + prod(sizes)).reshape(sizes)
    return Mesh.from_ranks(ranks.permute(order), [names[i] for i in order])


@st.composite
def meshes(draw, names, count):
    """A mesh of `count` ranks whose axes have any sizes, in any order."""
    sizes = draw(st.sampled_from(FACTORS[count]))
    return arranged(names, sizes, draw(st.sampled_from(list(permutations(range(len(sizes)))))))


@st.composite
def types(draw, mesh):
    shape = tuple(draw(st.lists(st.integers(0, 9) | st.just(24), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    cuts = dims.map(Shard) | st.builds(StridedShard, dims, st.integers(2, 4))
    places = st.sampled_from([Replicate(), Partial("sum"), Partial("max")]) | cuts
    chosen = [draw(places) for _ in mesh.axes]
    if len({p.reduce_op for p in chosen if isinstance(p, Partial)}) > 1:
        chosen = [Replicate() if isinstance(p, Partial) else p for p in chosen]
    pairs = [(a, p.dim) for a, p in zip(mesh.axes, chosen, strict=True) if hasattr(p, "dim")]
    axes = {d: [a for a, own in pairs if own == d] for _, d in pairs}
    order = {d: draw(st.permutations(own)) for d, own in axes.items()}
    return TensorType(shape, torch.float32, Layout(mesh, chosen, order))


def pending(type, rank):
    """The ranks that hold terms of the sums that this one holds a term of, and its reduce op."""
    sums = {a: op for a, op in type.layout.partial.items() if type.mesh.axis_size(a) > 1}
    return {*type.mesh.coset(tuple(sums), type.mesh.coord(rank))}, {*sums.values()}


@given(st.data(), st.sampled_from([4, 6, 8]))
def test_each_axis_is_a_product_of_axes_of_the_refinement(data, count):
    one, other = (data.draw(meshes(names, count)) for names in NAMES)
    both = refined(one, other)
    if both is None:  # as 2 x 3 and 3 x 2 ranks
        assert count == 6
        return
    assert sorted(both.order) == sorted(one.order) == sorted(other.order)
    cosets = [
        {frozenset(both.coset(axes, both.coord(0))) for axes in subsets(both.axes)},
        *({frozenset(m.coset((a,), m.coord(0))) for a in m.axes} for m in (one, other)),
    ]
    assert cosets[1] | cosets[2] <= cosets[0]
    assert prod(both.sizes) == count
    assert both.ndim <= one.ndim + other.ndim


def subsets(axes):
    return [tuple(a for i, a in enumerate(axes) if k >> i & 1) for k in range(1 << len(axes))]


@given(st.data(), st.sampled_from([4, 6, 8]))
def test_a_type_that_is_seen_on_another_mesh_has_the_same_blocks_and_terms(data, count):
    one, other = (data.draw(meshes(names, count)) for names in NAMES)
    type = data.draw(types(one))
    both = refined(one, other)
    for mesh in (m for m in (both, other) if m is not None):
        seen = seen_on(type, mesh)
        if seen is None:
            ways = [prod(map(one.axis_size, type.layout.cuts(d))) for d in range(type.ndim)]
            factors = [p.split_factor for p in type.layout.placements if hasattr(p, "split_factor")]
            ways = [n * prod(factors) for n in ways]
            uneven = any(size % n for size, n in zip(type.shape, ways, strict=True))
            assert uneven or mesh is not both
            continue
        assert seen.mesh is mesh
        for rank in one.order:
            assert seen.index(rank) == type.index(rank)
            assert pending(seen, rank) == pending(type, rank)
        assert seen_on(seen, one) is not None


def test_names_and_links_are_those_of_axes_that_are_one():
    folded, experts = Mesh(dp=4, tp=2, links={"dp": "infiniband"}), Mesh(edp=2, ep=4)
    assert refined(folded, Mesh(ep=8)) is folded
    both = refined(folded, experts)
    assert both.axes == ("edp", "dp_0", "tp")
    assert dict(both.links) == {"edp": "infiniband", "dp_0": "infiniband"}
    assert refined(experts, both, folded) is both
    assert refined(Mesh(x=4, z=2), Mesh(x=2, y=4)).axes == ("x_0", "x_1", "z")


def test_meshes_of_other_ranks_or_other_steps_have_none():
    assert refined(Mesh(x=4), Mesh(y=2)) is None
    assert refined(Mesh(x=2, y=3), Mesh(z=3, w=2)) is None
    assert refined(Mesh(x=4), Mesh.from_ranks([0, 2, 1, 3], "y")) is None
    assert refined(Mesh(x=4), Mesh.from_ranks([3, 2, 1, 0], "y")) is None
    strange = Mesh.from_ranks([5, 3, 8, 1], "x")
    halves = Mesh.from_ranks([[5, 3], [8, 1]], ("a", "b"))
    assert refined(strange, halves) is halves


def test_ragged_blocks_stay_on_an_axis_that_is_whole():
    mesh, other = Mesh(x=2, y=4), Mesh(a=2, b=2, c=2)
    type = TensorType((7,), torch.int64, Layout(mesh, [Ragged(0, (5, 2)), Replicate()]))
    assert str(seen_on(type, other)) == "i64[7@a:5:2]"
    type = TensorType((7,), torch.int64, Layout(mesh, [Replicate(), Ragged(0, (4, 2, 1, 0))]))
    assert seen_on(type, other) is None
