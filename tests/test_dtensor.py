"""Tests of fdtensor/dtensor.py: a DTensor is a record, and a node of pytrees."""

import attrs
import optree
import pytest
import torch
from hypothesis import given

from fdtensor.api import connect
from fdtensor.distribution import distribute, from_local
from fdtensor.dtensor import DTensor
from fdtensor.errors import CommError, LayoutError, PlanError
from fdtensor.layout import Layout, TensorType
from fdtensor.mesh import Mesh
from fdtensor.placement import Partial, Replicate, Shard
from fdtensor.planner import plan
from fdtensor.simulator import SimulatedComm
from fdtensor.testing.strategies import redistributions, types
from fdtensor.testing.values import full_tensor, gather_full, scatter

MESH = Mesh(dp=2, tp=2)
TYPE = TensorType((4, 2), torch.float32, Layout(MESH, [Shard(0), Replicate()]))
NAMESPACE = "fdtensor"


def dtensor(type=TYPE):
    comm = SimulatedComm(Mesh(world=1 + max(type.mesh.ranks)))
    return from_local(scatter(full_tensor(type, 0), type, 0), type, comm)


# --- a record --------------------------------------------------------------------------------


def test_a_dtensor_is_frozen_and_says_what_it_is():
    x = dtensor()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        x.local = ()
    assert (x.shape, x.dtype, x.layout, x.mesh) == ((4, 2), torch.float32, TYPE.layout, MESH)
    assert not isinstance(x, torch.Tensor)
    assert x == x
    assert x != dtensor()  # no elementwise comparison, and nothing to mistake it for
    assert len({x, x}) == 1


@given(redistributions() | redistributions(cross_mesh=True))
def test_a_dtensor_goes_from_layout_to_layout(redistribution):
    src, dst = redistribution
    x = dtensor(src)
    x = DTensor(x.local, src, SimulatedComm(Mesh(world=27)))
    y = x.redistribute(dst)
    assert y.type is dst
    assert y.comm is x.comm
    assert x.plan_to(dst) is plan(src, dst)
    full = full_tensor(src, 0)
    assert torch.equal(gather_full(y.local, dst), full)
    assert torch.equal(y.full(), full)
    if src.mesh is dst.mesh:
        assert x.redistribute(dst.layout).type is dst


@given(types(dtype=None))
def test_redistributing_makes_new_blocks(type):
    x = dtensor(type)
    y = x.redistribute(type)
    places = {t.untyped_storage().data_ptr() for t in x.local if t.numel()}
    assert not places & {t.untyped_storage().data_ptr() for t in y.local if t.numel()}


def test_a_dtensor_made_by_hand_is_looked_at_when_it_moves():
    x = DTensor((torch.ones(3, 2),) * 4, TYPE, SimulatedComm(MESH))
    with pytest.raises(CommError, match="rank 0 has shape"):
        x.redistribute(Layout(MESH, [Replicate(), Replicate()]))


def test_impossible_targets_are_refused():
    x = dtensor()
    with pytest.raises(LayoutError, match="shards dim 2 of a tensor that has 2 dims"):
        x.redistribute(Layout(MESH, [Shard(2), Replicate()]))
    with pytest.raises(PlanError, match="no plan fits in 1 bytes per rank"):
        x.redistribute(Layout(MESH, [Replicate(), Replicate()]), max_bytes=1)
    with pytest.raises(PlanError):
        x.redistribute("tp")


# --- a node ----------------------------------------------------------------------------------


def test_the_local_tensors_are_the_leaves():
    x = dtensor()
    leaves, spec = optree.tree_flatten(x, namespace=NAMESPACE)
    assert all(a is b for a, b in zip(leaves, x.local, strict=True))
    again = optree.tree_unflatten(spec, leaves)
    assert (again.type, again.comm) == (x.type, x.comm)
    assert all(a is b for a, b in zip(again.local, x.local, strict=True))
    assert optree.tree_leaves(x) == [x]  # elsewhere it is a leaf


def test_maps_over_the_leaves_give_a_dtensor():
    x = dtensor()
    y = optree.tree_map(lambda leaf: 2 * leaf, {"x": x}, namespace=NAMESPACE)["x"]
    assert torch.equal(y.full(), 2 * x.full())
    total = optree.tree_map(torch.add, x, y, namespace=NAMESPACE)
    assert torch.equal(total.full(), 3 * x.full())


@pytest.mark.parametrize("leaf", [None, 1, "x", object(), torch.ones(7)], ids=repr)
def test_unflattening_does_not_validate(leaf):
    spec = optree.tree_structure(dtensor(), namespace=NAMESPACE)
    x = optree.tree_unflatten(spec, [leaf] * 4)
    assert all(found is leaf for found in x.local)
    assert repr(x) == REPR


def test_structures_are_equal_where_type_and_comm_are():
    x, comm = dtensor(), SimulatedComm(MESH)
    a, b = (DTensor(x.local, TYPE, comm) for _ in range(2))
    structures = [optree.tree_structure(t, namespace=NAMESPACE) for t in (a, b, x)]
    assert structures[0] == structures[1] != structures[2]
    assert len(set(structures[:2])) == 1


# --- autograd --------------------------------------------------------------------------------


def test_detach_shares_memory_and_to_local_is_the_local_tensor():
    x = dtensor().requires_grad_()
    y = x.detach()
    assert [t.data_ptr() for t in y.local] == [t.data_ptr() for t in x.local]
    assert all(t.requires_grad for t in x.local)
    assert not any(t.requires_grad for t in y.local)
    assert x.to_local() is x.local
    assert not any(t.requires_grad for t in x.requires_grad_(False).local)


# --- how it reads ----------------------------------------------------------------------------


def test_a_simulated_dtensor_reads_well():
    assert repr(dtensor()) == REPR
    alone = DTensor((torch.ones(2),), *_one_rank())
    assert repr(alone) == "DTensor(f32[2@x] on Mesh(x=1), local=tensor([1., 1.]))"


def _one_rank():
    type = TensorType((2,), torch.float32, Mesh(x=1).layout("x"))
    return type, SimulatedComm(type.mesh)


def reading(layout):
    x = distribute(torch.arange(5), layout, connect(Mesh(world=4)))
    return repr(x)


@pytest.mark.mesh
def test_a_real_dtensor_reads_well(pool4):
    mesh = Mesh.from_ranks([0, 2, 3], "x")
    texts = pool4.run(reading, mesh.layout("x"))
    locals = ("tensor([0, 1])", "tensor([], dtype=torch.int64)", "tensor([2, 3])", "tensor([4])")
    for text, local in zip(texts, locals, strict=True):
        assert text == f"DTensor(i64[5@x] on {mesh!r}, local={local})"


def alone(layout):
    """What rank 0 sees of a loss, while the others go on; then all move together."""
    import torch.distributed as dist

    from fdtensor import FuncolComm, call, distribute

    comm = FuncolComm(layout.mesh)
    x = distribute(torch.arange(4.0), layout, comm)
    loss = call(torch.sum, x, out_layouts=layout.mesh.layout())
    seen = loss.full().item() if dist.get_rank() == 0 else None
    return seen, x.full().tolist()


@pytest.mark.mesh
def test_one_rank_may_look_at_a_replicated_tensor(pool4):
    found = pool4.run(alone, Mesh(x=4).layout("x"))
    assert [seen for seen, _ in found] == [6.0, None, None, None]
    assert all(full == [0, 1, 2, 3] for _, full in found)


def test_pending_terms_are_seen():
    layout = Layout(MESH, [Partial("avg"), Shard(1)])
    assert repr(dtensor(TYPE.with_layout(layout))).startswith("DTensor(f32[4,2@tp]{avg:dp} on ")


REPR = "DTensor(f32[4@dp,2] on Mesh(dp=2, tp=2), 4 local tensors)"
