"""Closed forms of bytes against messages counted one by one."""

import json

import attrs
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fdtensor import (
    ETHERNET,
    GLOO,
    H100,
    NCCL,
    NVLINK,
    CostModel,
    Layout,
    Mesh,
    Partial,
    Plan,
    PlanError,
    Ragged,
    Replicate,
    Shard,
    Step,
    TensorType,
    plan,
    trace,
)
from fdtensor.plans.bound import least_total, lower_bound
from fdtensor.plans.collectives import by_exchange
from fdtensor.plans.cost import seconds
from fdtensor.plans.movement import movement
from fdtensor.plans.routes import route
from fdtensor.plans.traffic import received, received_at, sent, sent_at
from fdtensor.testing.strategies import redistributions

R, S, P = Replicate(), Shard, Partial

crossing = st.booleans().flatmap(lambda cross: redistributions(cross_mesh=cross, dst_partial=False))


def spread(counts: np.ndarray, mesh: Mesh) -> dict[int, int]:
    return dict(zip(mesh.order, np.broadcast_to(counts, mesh.sizes).reshape(-1).tolist()))


@given(crossing)
def test_closed_forms_are_the_sums_of_messages(pair):
    src, dst = pair
    step = by_exchange(src, dst)
    assert spread(received(step), dst.mesh) == {r: received_at(step, r) for r in dst.mesh.order}
    assert spread(sent(step), src.mesh) == {r: sent_at(step, r) for r in src.mesh.order}


@given(crossing)
def test_both_sides_know_each_message(pair):
    src, dst = pair
    ranks = {*src.mesh.order, *dst.mesh.order}
    sends = {(r, m.peer, m.numel) for r in ranks for m in route(movement(src, dst), r).sends}
    recvs = {(m.peer, r, m.numel) for r in ranks for m in route(movement(src, dst), r).recvs}
    assert sends == recvs
    assert all(source != target and numel for source, target, numel in sends)
    assert len({(source, target) for source, target, _ in sends}) == len(sends)


@given(redistributions(partial=False))
def test_ranks_talk_only_along_the_axes_of_an_exchange(pair):
    src, dst = pair
    axes = movement(src, dst).axes
    assert axes is not None
    for rank in src.mesh.order:
        here = src.mesh.coord(rank)
        for message in route(movement(src, dst), rank).recvs:
            there = src.mesh.coord(message.peer)
            assert all(a == b for i, (a, b) in enumerate(zip(here, there)) if i not in axes)


def brute_bound(src: TensorType, dst: TensorType) -> int:
    """The bound of a reduction, element by element; one coset is all ranks of both meshes."""
    same = src.mesh is dst.mesh
    pending = {a for a in src.layout.partial if not same or a not in dst.layout.partial}
    kept = [src.mesh.axis(a) for a in src.layout.partial if same and a in dst.layout.partial]
    terms = 1
    for axis in pending:
        terms *= src.mesh.axis_size(axis)
    total = 0
    for coset in {tuple(src.mesh.coord(r)[i] for i in kept) for r in src.mesh.order}:
        met = [r for r in src.mesh.order if tuple(src.mesh.coord(r)[i] for i in kept) == coset]
        holders: dict[tuple[int, ...], set[int]] = {}
        wanters: dict[tuple[int, ...], set[int]] = {}
        for table, type in ((holders, src), (wanters, dst)):
            for rank in met if same else type.mesh.order:
                for element in torch.cartesian_prod(
                    *[torch.tensor(list(i), dtype=torch.int64) for i in (*type.index(rank), [0])]
                ).reshape(-1, len(type.shape) + 1):
                    table.setdefault(tuple(element.tolist()), set()).add(rank)
        for element, want in wanters.items():
            held = holders[element]
            if terms > 1:
                total += terms + len(want) - 1 - bool(want & held)
            else:
                total += len(want - held)
    return total * src.dtype.itemsize


@given(st.booleans().flatmap(lambda cross: redistributions(cross_mesh=cross, dst_partial=False)))
def test_the_bound_of_a_reduction_counts_every_element(pair):
    src, dst = pair
    assume(any(src.mesh.axis_size(a) > 1 for a in src.layout.partial) and src.numel)
    assert least_total(src, dst) == brute_bound(src, dst)


@pytest.mark.parametrize(
    ("before", "after", "bound"),
    [
        ([R, R], [R, P()], 0),
        ([R, S(0)], [R, P()], 0),
        ([R, R], [R, P("avg")], 0),
        ([R, S(0)], [R, P("avg")], 384),
        ([S(0), R], [R, P()], 64),
        ([P(), R], [P("avg"), R], 0),
    ],
    ids=str,
)
def test_the_bound_of_new_pending_terms(before, after, bound):
    mesh = Mesh(dp=2, tp=4)
    src = TensorType((8, 16), torch.float32, Layout(mesh, before))
    dst = TensorType((8, 16), torch.float32, Layout(mesh, after))
    assert lower_bound(src, dst) <= plan(src, dst).received_bytes
    assert lower_bound(src, dst) == bound


# --- sizes up to the largest -----------------------------------------------------------------

UNIT = 2**9 * 3**6
"""What every cut of `redistributions` divides, three of them one inside the other."""


def stretched(type: TensorType, dim: int, factor: int) -> TensorType:
    """The type with a dim, and what is ragged along it, `factor` times as long."""
    shape = tuple(n * factor if d == dim else n for d, n in enumerate(type.shape))
    cuts = [
        attrs.evolve(p, sizes=[n * factor for n in p.sizes])
        if isinstance(p, Ragged) and p.dim == dim
        else p
        for p in type.layout.placements
    ]
    return TensorType(shape, type.dtype, Layout(type.mesh, cuts, dict(type.layout.order)))


def figures(found: Plan) -> list[int]:
    """Every number of bytes that a plan announces, but for bounds that are rounded down."""
    ranks = [*found.src.mesh.order, *found.dst.mesh.order]
    one_by_one = [f(r) for r in ranks for f in (found.received_bytes_at, found.sent_bytes_at)]
    peaks = [found.peak_bytes_at(rank) for rank in ranks]
    totals = [found.received_bytes, found.total_bytes, found.sent_bytes, found.peak_bytes]
    return [*totals, found.least_total_bytes, *one_by_one, *peaks]


@given(
    st.booleans().flatmap(lambda cross: redistributions(cross_mesh=cross, dtype=None)), st.data()
)
def test_bytes_grow_in_step_with_a_dim_up_to_the_largest_tensor(pair, data):
    assume(pair[0].numel and pair[0].shape)
    dim = data.draw(st.integers(0, len(pair[0].shape) - 1))
    small = plan(*[stretched(t, dim, UNIT) for t in pair])
    factor = (2**63 - 1) // small.src.nbytes

    def large(t: TensorType) -> TensorType:
        return stretched(t, dim, factor)

    steps = [Step(s.collective, large(s.src), large(s.dst)) for s in small.steps]
    found = Plan(large(small.src), large(small.dst), tuple(steps), small.cost)
    assert found.src.nbytes > 2**62
    assert figures(found) == [factor * figure for figure in figures(small)]
    best = plan(found.src, found.dst)
    assert best.total_bytes == found.total_bytes
    ranks = (*best.src.mesh.order, *best.dst.mesh.order)
    assert best.received_bytes == max(map(best.received_bytes_at, ranks))
    assert best.received_bytes >= best.lower_bound_bytes


def test_a_program_announces_bytes_of_the_largest_tensors():
    mesh = Mesh(x=8)
    types = [TensorType((2**n, 8), torch.float32, mesh.layout("x")) for n in (20, 57)]
    small, large = (trace(several, t, out_layouts=mesh.layout()) for t in types)
    assert large.received_bytes == large.received_bytes_at(0) == 2**37 * small.received_bytes
    assert large.peak_bytes == 2**37 * small.peak_bytes > 2**63
    assert str(large).endswith("3.5 EiB received per rank")
    assert "3.5 EiB received per rank, peak 16.5 EiB" in large.summary()


def several(x):
    return x.exp(), x.sin(), x.cos()


# --- seconds ---------------------------------------------------------------------------------


def test_named_collectives_are_taken_where_they_are_fast_and_messages_where_those_are():
    mesh = Mesh(dp=4)
    src = TensorType((4096, 1024), torch.float32, mesh.layout("dp"))
    assert str(plan(src, mesh.layout(), cost=NCCL).steps[0].collective).startswith("all_gather")
    (step,) = plan(src, mesh.layout(), cost=GLOO).steps
    assert str(step.collective) == "exchange[axis=dp way=peer_to_peer]"


def test_an_axis_may_have_a_link_of_its_own():
    mesh = Mesh(slow=2, fast=2)
    src = TensorType((4096, 1024), torch.float32, mesh.layout("slow", "fast"))
    cost = CostModel(
        "two links", 1e-6, 1e11, 1e12, 1e12, (("", 1e-5),), (), axes=(("slow", 1e-5, 1e9),)
    )
    over_fast = plan(src, mesh.layout("slow"), cost=cost).seconds
    over_slow = plan(src, mesh.layout(None, "fast"), cost=cost).seconds
    assert over_slow > 50 * over_fast
    assert cost.link(("slow", "fast")) == (1e-5, 1e9)
    assert cost.link(("fast",)) == (1e-6, 1e11)
    assert cost.link(None) == (1e-5, 1e9)


def test_the_links_that_a_mesh_names_are_those_of_a_cost_model():
    plain, links = Mesh(dp=2, tp=4), {"dp": "ethernet", "tp": "nvlink"}
    named = Mesh(dp=2, tp=4, links=links)
    by_rows = NCCL.with_links(dp=ETHERNET, tp=NVLINK)

    def over(mesh, *dims, cost=NCCL):
        src = TensorType((4096, 1024), torch.float32, mesh.layout("dp", "tp"))
        return plan(src, mesh.layout(*dims), cost=cost).seconds

    for dims in ((), ("dp",), (None, "tp"), ("tp", "dp")):
        assert over(named, *dims) == over(plain, *dims, cost=by_rows) != over(plain, *dims)
        assert over(named, *dims, cost=by_rows) == over(plain, *dims, cost=by_rows)
    fast = NCCL.with_links(dp=NVLINK)
    assert over(named, None, "tp", cost=fast) == over(plain, None, "tp", cost=fast)


def test_between_two_meshes_the_slowest_link_of_both_counts():
    def between(first, second, cost=NCCL):
        src_mesh = Mesh.from_ranks([0, 1], "x", links={"x": first} if first else None)
        dst_mesh = Mesh.from_ranks([2, 3], "x", links={"x": second} if second else None)
        src = TensorType((1 << 20,), torch.float32, src_mesh.layout("x"))
        return plan(src, dst_mesh.layout("x"), cost=cost).seconds

    slow = between("ethernet", "ethernet")
    assert between("nvlink", "ethernet") == between("ethernet", None) == slow > between(None, None)
    assert between("nvlink", "nvlink") == between(None, None)  # what lies between is of the model
    assert between("infiniband", None, H100) > between("nvlink", None, H100)


def test_a_plan_keeps_the_links_of_its_meshes_as_json():
    mesh = Mesh.from_ranks([[0, 2], [1, 3]], ("x", "y"), links={"y": "nvlink"})
    made = plan(TensorType((8, 8), torch.float32, mesh.layout("x", "y")), mesh.layout("y"))
    assert Plan.from_json(made.to_json()) == made
    assert Plan.from_json(made.to_json()).src.mesh is mesh
    for wrong in ("pcie", 3):
        with pytest.raises(PlanError):
            Plan.from_json(made.to_json().replace('"nvlink"', json.dumps(wrong)))


@given(redistributions(), st.sampled_from([GLOO, NCCL]))
def test_seconds_are_the_sum_over_steps(pair, cost):
    found = plan(*pair, cost=cost)
    assert found.seconds == sum(seconds(step, cost) for step in found.steps)
    assert found.seconds >= 0
