"""Many tensors moved together: the same blocks as one at a time, in a few rounds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdtensor import (
    GLOO,
    NCCL,
    DTensor,
    Mesh,
    SimulatedComm,
    ValueTreeError,
    distribute,
    fuse,
    plan,
    redistribute,
    run,
    run_fused,
)
from fdtensor.testing.strategies import redistributions
from fdtensor.testing.values import full_tensor, scatter

WORLD = Mesh(world=5)

pairs = st.booleans().flatmap(lambda cross: redistributions(world=5, cross_mesh=cross))


@given(st.lists(pairs, max_size=5), st.sampled_from([GLOO, NCCL]), st.integers(0, 99))
def test_fused_plans_do_what_each_does_alone(found, cost, seed):
    plans = [plan(src, dst, cost=cost) for src, dst in found]
    values = [scatter(full_tensor(src, seed), src, seed) for src, _ in found]
    together = SimulatedComm(WORLD)
    moved = run_fused(fuse(plans), values, together)
    alone = [run(p, v, SimulatedComm(WORLD)) for p, v in zip(plans, values, strict=True)]
    for one, other in zip(moved, alone, strict=True):
        assert all(map(torch.equal, one, other))
    assert together.calls["exchange"] == fuse(plans).rounds <= 2
    assert together.calls.total() == together.calls["exchange"]


def params(comm):
    """A hundred parameters of mixed dtypes, shapes and layouts, and where they are to go."""
    mesh = comm.mesh
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    sources = [mesh.layout("a"), mesh.layout(None, "b"), mesh.layout(("b", "a")), mesh.layout()]
    targets = [mesh.layout(None, ("a", "b")), mesh.layout(), mesh.layout("b", "a")]
    tree, layouts = {}, {}
    for i in range(100):
        shape = (i % 7 + 1, i % 5 + 1)
        tensor = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtypes[i % 5])
        tree[f"p{i}"] = distribute(tensor, sources[i % 4], comm)
        layouts[f"p{i}"] = targets[i % 3]
    return tree, layouts


def test_a_hundred_parameters_take_one_round():
    comm = SimulatedComm(Mesh(a=2, b=2))
    tree, layouts = params(comm)
    before = comm.calls.total()
    moved = redistribute(tree, layouts)
    assert comm.calls.total() - before == 1
    for name, value in tree.items():
        alone = value.redistribute(layouts[name])
        assert moved[name].type is alone.type
        assert all(map(torch.equal, moved[name].local, alone.local))


@pytest.mark.mesh
def test_a_hundred_parameters_move_on_real_ranks(pool4):
    def moved():
        from fdtensor import FuncolComm

        comm = FuncolComm(Mesh(a=2, b=2))
        tree, layouts = params(comm)
        sent = []
        post = comm._post
        comm._post = lambda steps, parcels, sizes: (
            sent.append(len(parcels)),
            post(steps, parcels, sizes),
        )[1]
        together = redistribute(tree, layouts)
        alone = {name: value.redistribute(layouts[name]) for name, value in tree.items()}
        same = all(torch.equal(together[n].local, alone[n].local) for n in tree)
        return same, sent

    for same, sent in pool4.run(moved):
        assert same
        assert len(sent) == 1
        assert sent[0] <= 3


def test_a_fused_plan_prints_its_plans_and_has_one_digest():
    comm = SimulatedComm(Mesh(a=2, b=2))
    tree, layouts = params(comm)
    plans = [tree[name].plan_to(layouts[name]) for name in ("p0", "p1")]
    fused = fuse(plans)
    assert str(fused).startswith("2 plans in 1 round")
    assert fused.digest == fuse(plans).digest != fuse(plans[::-1]).digest
    assert fused is fuse(plans)


def test_gradients_of_many_tensors_flow_back_together():
    comm = SimulatedComm(Mesh(a=2, b=2))
    mesh = comm.mesh
    full = [torch.arange(6.0).reshape(2, 3).requires_grad_(), torch.ones(5, requires_grad=True)]
    tree = {
        "w": distribute(full[0], mesh.layout("a"), comm),
        "b": distribute(full[1], mesh.layout("b"), comm),
    }
    moved = redistribute(tree, mesh.layout())
    loss = (moved["w"].local[0] ** 2).sum() + 3 * moved["b"].local[0].sum()
    (loss).backward()
    assert full[0].grad is not None
    assert full[1].grad is not None


def test_layouts_may_be_a_prefix_of_the_tree():
    comm = SimulatedComm(Mesh(a=2, b=2))
    mesh = comm.mesh
    one = distribute(torch.arange(6), mesh.layout("a"), comm)
    tree = {"x": [one, one], "y": (one, 7)}
    moved = redistribute(tree, {"x": mesh.layout("b"), "y": mesh.layout()})
    assert [v.layout for v in moved["x"]] == [mesh.layout("b")] * 2
    assert moved["y"][0].layout is mesh.layout()
    assert moved["y"][1] == 7


def test_layouts_of_another_structure_are_refused():
    comm = SimulatedComm(Mesh(a=2, b=2))
    one = distribute(torch.arange(6), comm.mesh.layout("a"), comm)
    with pytest.raises(ValueTreeError, match="do not have the structure"):
        redistribute({"x": one}, {"z": comm.mesh.layout()})
    with pytest.raises(ValueTreeError, match="1 of 2 DTensors cannot be redistributed"):
        redistribute(
            {"x": one, "y": one}, {"x": comm.mesh.layout(), "y": comm.mesh.layout(None, "a")}
        )
    assert isinstance(one, DTensor)
