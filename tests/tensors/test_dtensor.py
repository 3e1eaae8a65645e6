"""Tests of tensors/dtensor.py: a DTensor is a record, and a node of pytrees."""

import optree
import pytest
import torch
from hypothesis import given

from fdtensor.layouts.errors import CommError, LayoutError, NotTorchError, PlanError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.planner import plan
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.call import call
from fdtensor.tensors.connect import connect
from fdtensor.tensors.distribution import distribute, from_local
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.grad_norms import gradients
from fdtensor.tensors.spmd import spmd
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
    with pytest.raises(NotTorchError, match="never changes"):
        x.local = ()
    assert (x.shape, x.dtype, x.layout, x.mesh) == ((4, 2), torch.float32, TYPE.layout, MESH)
    assert not isinstance(x, torch.Tensor)
    assert (x == x).full().all()
    with pytest.raises(CommError, match="another Comm"):
        _ = x == dtensor()
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
    with pytest.raises(LayoutError, match="'tp' is not a Layout"):
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


@pytest.mark.parametrize("leaf", [None, 1, "x", object(), torch.ones(7)])
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


def reading(layout):
    x = distribute(torch.arange(5), layout, connect(Mesh(world=4)))
    return repr(x)


@pytest.mark.mesh
def test_a_real_dtensor_reads_the_same_on_all_ranks(pool4):
    mesh = Mesh.from_ranks([0, 2, 3], "x")
    texts = pool4.run(reading, mesh.layout("x"))
    assert set(texts) == {f"DTensor(i64[5@x] on {mesh!r})"}


STAGE = Mesh.from_ranks([2, 3], "x")


def stage(comm, w):
    """What a loss of two ranks is to this rank: its value and text, and the gradient of w."""
    x = distribute(torch.arange(8.0).reshape(2, 4), STAGE.layout("x"), comm)
    w = distribute(w, STAGE.layout(None, "x"), comm).requires_grad_()
    y = spmd(torch.mm)(x, w)
    loss = call(torch.sum, y)
    loss.full().backward()
    same = call(torch.Tensor.item, loss.detach())
    whole = y.detach().full()
    return loss.full().item(), same, repr(loss), whole, gradients(w).full()


def stage_on_a_rank(w):
    return stage(connect(Mesh(world=4)), w)


@pytest.mark.mesh
def test_every_rank_of_the_comm_is_told_the_same(pool4):
    w = torch.arange(12.0).reshape(4, 3)
    expected = stage(SimulatedComm(Mesh(world=4)), w)
    y = torch.arange(8.0).reshape(2, 4) @ w
    assert expected[:2] == (y.sum().item(),) * 2
    for answer in (expected, *pool4.run(stage_on_a_rank, w)):
        assert answer[:3] == expected[:3]
        assert torch.equal(answer[3], y)
        assert torch.equal(answer[4], torch.arange(8.0).reshape(2, 4).sum(0)[:, None].expand(4, 3))


def outside_of_all():
    comm = connect(STAGE)
    x = distribute(torch.ones(4), STAGE.layout("x"), comm)
    try:
        return x.full().tolist()
    except CommError as error:
        return str(error)


@pytest.mark.mesh
def test_a_rank_that_the_comm_does_not_have_is_refused(pool4):
    answers = pool4.run(outside_of_all)
    assert answers[2:] == [[1, 1, 1, 1]] * 2
    assert answers[0] == OUTSIDE


OUTSIDE = """\
rank 0 asks for a tensor of a Comm that it is not in.

  comm:   Mesh.from_ranks([2, 3], ('x',))
  tensor: f32[4@x] on Mesh.from_ranks([2, 3], ('x',))

Ask on the ranks of the Comm, or connect a mesh of all ranks that ask."""


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


REPR = "DTensor(f32[4@dp,2] on Mesh(dp=2, tp=2))"
