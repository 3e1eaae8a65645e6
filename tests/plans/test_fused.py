"""Tests of plans/fused.py: many tensors together are what they are one at a time."""

import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor.layouts.errors import CommError, PlanError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collectives import AllReduce, Exchange, is_local
from fdtensor.plans.cost import GLOO, NCCL
from fdtensor.plans.fused import batched, fuse
from fdtensor.plans.planner import by_layouts, plan
from fdtensor.runtime.interpreter import run, run_fused
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.connect import connect, redistribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.testing.strategies import DTYPES, redistributions
from fdtensor.testing.values import full_tensor, gather_full, scatter

few = settings(max_examples=settings.default.max_examples // 2)

dtypes = st.sampled_from((*DTYPES, torch.uint16, torch.float16))


def journeys(world=8):
    """Any redistributions on the ranks of a world, on one mesh or from one to another."""
    one = dtypes.flatmap(
        lambda dtype: (
            redistributions(world, dtype=dtype) | redistributions(world, True, dtype=dtype)
        )
    )
    return st.lists(one, max_size=5)


costs = st.sampled_from((NCCL, GLOO))


def values_of(pairs):
    return [scatter(full_tensor(src, i), src, i) for i, (src, _) in enumerate(pairs)]


def same(a, b):
    return a.dtype is b.dtype and torch.equal(a.to(torch.complex128), b.to(torch.complex128))


# --- plans -----------------------------------------------------------------------------------


@given(journeys(), costs)
def test_together_is_what_each_is_alone(pairs, cost):
    comm, values = SimulatedComm(Mesh(world=8)), values_of(pairs)
    plans = [plan(*pair, cost=cost) for pair in pairs]
    together = run_fused(fuse(plans), values, comm)
    for found, value, moved in zip(plans, values, together, strict=True):
        alone = run(found, value, comm)
        if found.dst.layout.partial:  # terms may be split otherwise
            alone, moved = ([gather_full(v, found.dst)] for v in (alone, moved))
        assert all(map(same, alone, moved))


@given(journeys(), costs)
def test_at_most_two_rounds_move_all(pairs, cost):
    comm, fused = SimulatedComm(Mesh(world=8)), fuse([plan(*pair, cost=cost) for pair in pairs])
    assert all(
        is_local(s) or isinstance(s.collective, Exchange) for p in fused.plans for s in p.steps
    )
    run_fused(fused, values_of(pairs), comm)
    assert set(comm.calls) <= {"exchange"}
    assert comm.calls["exchange"] <= fused.rounds <= 2


@given(journeys(), costs)
def test_together_moves_the_bytes_of_each_alone(pairs, cost):
    """A ring rounds down what it announces, and a 0-d tensor is reduced by all who want it.

    Alone is the best plan by layouts: owners of no layout would take rounds of their own.
    """
    for src, dst in pairs:
        alone = by_layouts(src, dst, cost)
        (together,) = fuse([alone]).plans
        comm = SimulatedComm(Mesh(world=8))
        assert fuse([plan(src, dst, cost=cost)]).plans == (together,)
        run_fused(fuse([alone]), values_of([(src, dst)]), comm)
        assert comm.received.total() == together.total_bytes
        assert comm.received == {r: n for r in range(8) if (n := together.received_bytes_at(r))}
        if not any(isinstance(step.collective, AllReduce) for step in alone.steps):
            assert together.total_bytes == alone.total_bytes
        elif src.shape:
            assert together.total_bytes < alone.total_bytes + 2 * src.mesh.size


@given(journeys())
def test_the_type_of_each_stays(pairs):
    plans = [plan(*pair) for pair in pairs]
    fused = fuse(plans)
    assert [(p.src, p.dst) for p in fused.plans] == pairs
    assert fuse(plans) is fused
    assert fuse(fused.plans) is fused
    assert fused.received_bytes == sum(p.received_bytes for p in fused.plans)
    assert len(fused.digest) == 32


def test_the_digest_sees_the_order():
    mesh = Mesh(dp=2)
    a = plan(TensorType((4,), torch.int64, mesh.layout("dp")), mesh.layout())
    b = plan(TensorType((6,), torch.int64, mesh.layout("dp")), mesh.layout())
    digests = {fuse(plans).digest for plans in ([], [a], [b], [a, b], [b, a], [a, a])}
    assert len(digests) == 6


@given(redistributions(dtype=torch.float64, partial=("sum", "avg")), st.integers(0, 3))
def test_a_batch_is_a_tensor_with_one_more_dim(redistribution, size):
    src, dst = redistribution
    wide = batched(plan(src, dst), size)
    assert wide.src.shape == wide.dst.shape == (size, *src.shape)
    for narrow, type in ((src, wide.src), (dst, wide.dst)):
        assert type.layout.partial == narrow.layout.partial
        for rank in type.mesh.ranks:
            assert type.index(rank) == (range(size), *narrow.index(rank))


# --- a hundred -------------------------------------------------------------------------------


def hundred(world=None):
    """A hundred parameters of every kind, with where they go: always the same ones."""
    draw = random.Random(0)
    first, second = Mesh(dp=2, tp=2), Mesh.from_ranks([3, 1, 2], "x")
    pairs = []
    for i in range(100):
        shape = draw.choice([(), (3,), (8,), (7, 5), (16, 4), (2, 3, 4), (0, 3)])
        dtype = draw.choice(
            [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
        )
        dims = range(len(shape))

        def layout(mesh):
            op = Partial("bor" if dtype in (torch.int64, torch.bool) else "sum")  # noqa: B023
            choices = [Replicate(), op, *(Shard(d) for d in dims)]  # noqa: B023
            return Layout(mesh, [draw.choice(choices) for _ in mesh.axes])

        meshes = (first, first) if i % 3 else draw.choice([(first, second), (second, first)])
        src, dst = (layout(mesh) for mesh in meshes)
        if src.partial:
            dst = Layout(
                dst.mesh, [Replicate() if isinstance(p, Partial) else p for p in dst.placements]
            )
        pairs.append((TensorType(shape, dtype, src), TensorType(shape, dtype, dst)))
    return pairs


def test_a_hundred_parameters_take_two_rounds():
    pairs = hundred()
    comm, values = SimulatedComm(Mesh(world=4)), values_of(pairs)
    tree = {
        i: DTensor(v, src, comm) for i, (v, (src, _)) in enumerate(zip(values, pairs, strict=True))
    }
    layouts = {i: dst for i, (_, dst) in enumerate(pairs)}
    alone = {i: x.redistribute(layouts[i]) for i, x in tree.items()}
    assert comm.calls.total() > 60
    by_layout = sum(by_layouts(*pair, NCCL).total_bytes for pair in pairs)
    assert comm.received.total() <= by_layout
    comm.calls.clear()
    comm.received.clear()
    together = redistribute(tree, layouts)
    assert comm.calls == {"exchange": 2}
    assert abs(comm.received.total() - by_layout) < 200
    for i in tree:
        assert together[i].type is alone[i].type
        if layouts[i].layout.partial:  # terms may be split otherwise
            assert same(together[i].full(), alone[i].full())
        else:
            assert all(map(same, together[i].local, alone[i].local))


def sends_of_a_hundred():
    """Whether all blocks are right, and how many messages this rank has sent and started."""
    comm, rank, pairs = connect(Mesh(world=4)), dist.get_rank(), hundred()
    sent = []
    messages = comm.around.messages
    comm.around.messages = lambda ranks, to, *rest: (
        sent.append(len(to)),
        messages(ranks, to, *rest),
    )[1]
    tree = []
    for value, (src, _) in zip(values_of(pairs), pairs, strict=True):
        place = src.mesh.position(rank)
        tree.append(DTensor(torch.empty(0) if place is None else value[place], src, comm))
    together = redistribute(tree, [dst for _, dst in pairs])
    fused, sent[:] = list(sent), []
    alone = [x.redistribute(dst) for x, (_, dst) in zip(tree, pairs, strict=True)]
    here = [dst.mesh.position(rank) is not None and not dst.layout.partial for _, dst in pairs]
    right = [same(a.local, b.local) for a, b, h in zip(together, alone, here, strict=True) if h]
    return all(right) and len(right) > 40, fused


@pytest.mark.mesh
def test_a_hundred_parameters_take_a_message_a_peer_and_round(pool4):
    for right, sent in pool4.run(sends_of_a_hundred):
        assert right
        assert len(sent) == 2
        assert max(sent) <= 3


def moved(pairs, check):
    comm, rank = connect(Mesh(world=4), check=check), dist.get_rank()
    values = []
    for value, (src, _) in zip(values_of(pairs), pairs, strict=True):
        place = src.mesh.position(rank)
        values.append(None if place is None else value[place])
    plans = [plan(*pair, cost=comm.cost) for pair in pairs]
    together = run_fused(fuse(plans), values, comm)
    alone = [run(found, value, comm) for found, value in zip(plans, values, strict=True)]
    return [
        (type(a), tuple(a.shape)) == (type(b), tuple(b.shape))
        and (dst.layout.partial or same(a, b))
        if isinstance(a, torch.Tensor)
        else a is b is None
        for a, b, (_, dst) in zip(together, alone, pairs, strict=True)
    ]


@pytest.mark.mesh
@few
@given(journeys(4), st.sampled_from(("first", "always", "never")))
def test_real_ranks_move_together_what_they_move_alone(pool4, pairs, check):
    for right in pool4.run(moved, pairs, check):
        assert all(right)


# --- what is refused -------------------------------------------------------------------------


def test_a_value_that_does_not_fit_is_refused():
    mesh = Mesh(dp=2)
    comm = SimulatedComm(mesh)
    found = plan(TensorType((4,), torch.float32, mesh.layout("dp")), mesh.layout())
    good, bad = (torch.ones(2),) * 2, (torch.ones(2), torch.ones(3))
    for values in ([good, bad], [bad, good]):
        with pytest.raises(CommError, match="rank 1 has shape"):
            run_fused(fuse([found, found]), values, comm)
    run_fused(fuse([found, found]), [good, good], comm)
    with pytest.raises(CommError, match="rank 1 has shape"):
        run_fused(fuse([found, found]), [good, bad], comm)


def test_one_plan_that_is_not_linear_has_no_transpose():
    mesh = Mesh(dp=2)
    type = TensorType((4,), torch.float32, mesh.layout(partial={"dp": "sum"}))
    linear = plan(type, mesh.layout())
    other = plan(type.with_layout(mesh.layout(partial={"dp": "max"})), mesh.layout())
    assert fuse([linear]).transpose() is fuse([linear.transpose()])
    with pytest.raises(PlanError, match="a plan with max pending is not linear"):
        fuse([linear, other]).transpose()


def test_a_fused_plan_reads_as_its_plans():
    mesh = Mesh(dp=2)
    found = plan(TensorType((4,), torch.float32, mesh.layout("dp")), mesh.layout())
    fused = fuse([found, found])
    assert str(fused) == READS
    assert eval(repr(fused), {"Fused": type(fused), "Plan": type(found)}) is fused


READS = """\
2 plans in 1 round
f32[4@dp] -> f32[4] on Mesh(dp=2)
  exchange[axis=dp way=all_to_all]  f32[4]  8 B
1 step, 8 B received per rank
f32[4@dp] -> f32[4] on Mesh(dp=2)
  exchange[axis=dp way=all_to_all]  f32[4]  8 B
1 step, 8 B received per rank"""
