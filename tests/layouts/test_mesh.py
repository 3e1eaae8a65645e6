"""Tests of layouts/mesh.py and, with every kind of value, of layouts/record.py."""

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdtensor.layouts import layout, record, tensor_type
from fdtensor.layouts.errors import MeshError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.mesh_fields import LINKS
from fdtensor.layouts.placement import Partial, Ragged, Shard
from fdtensor.testing.strategies import layouts, meshes, placements, types

RECORDS = st.one_of(meshes(), meshes(world=9), placements(), layouts(), types(dtype=None))


@given(RECORDS)
def test_the_repr_of_a_record_is_its_source(made):
    assert eval(repr(made), {**vars(layout), **vars(tensor_type)}) is made


@given(RECORDS)
def test_copies_and_pickles_of_a_record_are_the_record(made):
    assert copy.copy(made) is made
    assert copy.deepcopy([made])[0] is made
    assert pickle.loads(pickle.dumps(made)) is made


@given(RECORDS, RECORDS)
def test_records_are_equal_where_their_reprs_are(a, b):
    assert (a == b) == (repr(a) == repr(b))
    assert a != b or hash(a) == hash(b)


@given(RECORDS)
def test_a_record_cannot_be_changed(made):
    for field in attrs.fields(type(made)):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(made, field.name, None)


def test_evolving_a_record_gives_the_one_that_is_there():
    assert attrs.evolve(Shard(0), dim=1) is Shard(1)


def test_records_made_in_threads_are_one():
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: Ragged(0, tuple(range(50))), range(200)))
    assert len(set(map(id, made))) == 1


def test_a_record_that_nobody_holds_is_forgotten():
    gc.collect()
    before = len(record._existing)
    made = [Ragged(5, (n, 12345)) for n in range(100)]
    assert len(record._existing) == before + 100
    del made
    gc.collect()
    assert len(record._existing) == before


@given(meshes(world=9))
def test_every_rank_has_one_coordinate(mesh):
    coords = list(product(*map(range, mesh.sizes)))
    assert [mesh.coord(rank) for rank in mesh.ranks] == coords
    assert [mesh.rank_at(coord) for coord in coords] == list(mesh.ranks)
    assert [mesh.position(rank) for rank in mesh.ranks] == list(range(mesh.size))
    for rank in {-1, *range(10)} - {*mesh.ranks}:
        assert mesh.coord(rank) is None
        assert mesh.position(rank) is None


@given(meshes(world=9), st.data())
def test_the_cosets_of_some_axes_partition_the_ranks(mesh, data):
    axes = data.draw(st.permutations(mesh.axes))[: data.draw(st.integers(0, mesh.ndim))]
    cosets = {mesh.coset(axes, mesh.coord(rank)) for rank in mesh.ranks}
    assert sorted(rank for coset in cosets for rank in coset) == sorted(mesh.ranks)
    for coset in cosets:
        moved = [[mesh.coord(rank)[mesh.axis(axis)] for axis in axes] for rank in coset]
        assert moved == sorted(moved)
        still = {tuple(i for a, i in zip(mesh.axes, mesh.coord(r)) if a not in axes) for r in coset}
        assert len(still) == 1


@given(meshes(world=9))
def test_a_mesh_is_made_of_any_kind_of_array(mesh):
    ranks = torch.tensor(mesh.ranks).reshape(mesh.sizes)
    assert Mesh.from_ranks(ranks, mesh.axes) is mesh
    assert Mesh.from_ranks(ranks.numpy(), list(mesh.axes)) is mesh
    assert Mesh.from_ranks(ranks.tolist(), mesh.axes) is mesh
    device_mesh = SimpleNamespace(mesh=ranks, mesh_dim_names=mesh.axes)
    assert mesh.ndim == 0 or Mesh.from_device_mesh(device_mesh) is mesh


def test_unnamed_axes_of_a_device_mesh_are_numbered():
    device_mesh = SimpleNamespace(mesh=torch.arange(4).reshape(2, 2), mesh_dim_names=None)
    assert Mesh.from_device_mesh(device_mesh) is Mesh(dim_0=2, dim_1=2)


def test_one_axis_may_be_named_by_a_string():
    assert Mesh.from_ranks([0, 1], "dp") is Mesh(dp=2)


def test_a_mesh_tells_its_sizes():
    mesh = Mesh(dp=2, tp=4)
    assert (mesh.axes, mesh.sizes, mesh.size, mesh.ndim) == (("dp", "tp"), (2, 4), 8, 2)
    assert (mesh.axis("tp"), mesh.axis_size("tp")) == (1, 4)
    assert mesh.ranks == (0, 1, 2, 3, 4, 5, 6, 7)
    with pytest.raises(MeshError, match="no axis 'pp'"):
        mesh.axis_size("pp")


def test_a_mesh_of_millions_is_small():
    mesh = Mesh(dp=2**20, tp=8)
    assert isinstance(mesh.order, range)
    assert mesh.coord(8 * 77 + 5) == (77, 5)
    assert pickle.loads(pickle.dumps(mesh)) is mesh
    assert len(pickle.dumps(mesh)) < 200


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (Mesh(), "Mesh()"),
        (Mesh(dp=2, tp=4), "Mesh(dp=2, tp=4)"),
        (Mesh.from_ranks(3, ()), "Mesh.from_ranks(3, ())"),
        (Mesh.from_ranks([1, 0], ["dp"]), "Mesh.from_ranks([1, 0], ('dp',))"),
        (
            Mesh.from_ranks([[0, 2], [1, 3]], ("dp", "tp")),
            "Mesh.from_ranks([[0, 2], [1, 3]], ('dp', 'tp'))",
        ),
        (Mesh.from_ranks([0, 1], ["a b"]), "Mesh.from_ranks([0, 1], ('a b',))"),
        (Mesh(**{"class": 2}), "Mesh.from_ranks([0, 1], ('class',))"),
        (Mesh(self=1, cls=2), "Mesh(self=1, cls=2)"),
        (
            Mesh(dp=2, tp=4, links={"tp": "nvlink", "dp": "infiniband"}),
            "Mesh(dp=2, tp=4, links={'dp': 'infiniband', 'tp': 'nvlink'})",
        ),
        (
            Mesh.from_ranks([1, 0], ["dp"], links={"dp": "ethernet"}),
            "Mesh.from_ranks([1, 0], ('dp',), links={'dp': 'ethernet'})",
        ),
        (
            Mesh.from_ranks([0, 1], ["links"], links={"links": "nvlink"}),
            "Mesh.from_ranks([0, 1], ('links',), links={'links': 'nvlink'})",
        ),
    ],
)
def test_a_mesh_prints_as_its_source(mesh, text):
    assert repr(mesh) == str(mesh) == text
    assert eval(text) is mesh


@st.composite
def _linked(draw):
    mesh = draw(meshes(world=9))
    links = {axis: draw(st.sampled_from([None, *LINKS])) for axis in mesh.axes}
    return mesh, {axis: link for axis, link in links.items() if link}


@given(_linked())
def test_the_links_of_a_mesh_are_part_of_it(drawn):
    mesh, links = drawn
    ranks = torch.tensor(mesh.ranks).reshape(mesh.sizes)
    made = Mesh.from_ranks(ranks, mesh.axes, links=links)
    assert made.links == tuple((axis, links[axis]) for axis in mesh.axes if axis in links)
    assert (made is mesh) == (not links)
    assert eval(repr(made)) is pickle.loads(pickle.dumps(made)) is copy.deepcopy(made) is made
    for axis in mesh.axes:
        part = made.part([axis], made.coord(made.ranks[0]))
        assert part.links == tuple(pair for pair in made.links if pair[0] == axis)
        assert part.ranks == made.coset([axis], made.coord(made.ranks[0]))


def test_an_axis_may_be_called_links():
    both = Mesh.from_ranks([[0, 1], [2, 3]], ("links", "dp"), links={"links": "ethernet"})
    assert (both.axes, both.sizes, both.links) == (
        ("links", "dp"),
        (2, 2),
        (("links", "ethernet"),),
    )
    assert Mesh(links=4).axes == ("links",)
    assert Mesh(dp=2, links={}) is Mesh(dp=2)


def test_placements_of_other_kinds_differ():
    assert len({Shard(0), Ragged(0, ()), Partial("sum"), Partial("max"), Shard(1)}) == 5


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", None, True])
def test_a_size_is_a_positive_int(size):
    with pytest.raises(MeshError, match="has size"):
        Mesh(dp=size)


@pytest.mark.parametrize("name", ["", "a\n", "\0", "\ud800", None, 0])
def test_the_name_of_an_axis_can_be_printed(name):
    with pytest.raises(MeshError, match="no name for a mesh axis"):
        Mesh.from_ranks([0, 1], [name])
