"""Closed forms of bytes against messages counted one by one."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fdtensor import (
    GLOO,
    NCCL,
    CostModel,
    Layout,
    Mesh,
    Partial,
    Replicate,
    Shard,
    TensorType,
    plan,
)
from fdtensor.cost import seconds
from fdtensor.exchange import route, talk
from fdtensor.testing.strategies import redistributions
from fdtensor.traffic import least_total, lower_bound, received, received_at, sent, sent_at
from fdtensor.transition import by_exchange

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
    sends = {(r, m.peer, m.numel) for r in ranks for m in route(src, dst, r).sends}
    recvs = {(m.peer, r, m.numel) for r in ranks for m in route(src, dst, r).recvs}
    assert sends == recvs
    assert all(source != target and numel for source, target, numel in sends)
    assert len({(source, target) for source, target, _ in sends}) == len(sends)


@given(redistributions(partial=False))
def test_ranks_talk_only_along_the_axes_of_an_exchange(pair):
    src, dst = pair
    axes = talk(src, dst).axes
    assert axes is not None
    for rank in src.mesh.order:
        here = src.mesh.coord(rank)
        for message in route(src, dst, rank).recvs:
            there = src.mesh.coord(message.peer)
            assert all(a == b for i, (a, b) in enumerate(zip(here, there)) if i not in axes)


def brute_bound(src: TensorType, dst: TensorType) -> int:
    """The bound of a reduction on one mesh, element by element."""
    pending = {a for a in src.layout.partial if a not in dst.layout.partial}
    kept = [src.mesh.axis(a) for a in src.layout.partial if a in dst.layout.partial]
    terms = 1
    for axis in pending:
        terms *= src.mesh.axis_size(axis)
    total = 0
    for coset in {tuple(src.mesh.coord(r)[i] for i in kept) for r in src.mesh.order}:
        ranks = [r for r in src.mesh.order if tuple(src.mesh.coord(r)[i] for i in kept) == coset]
        holders: dict[tuple[int, ...], set[int]] = {}
        wanters: dict[tuple[int, ...], set[int]] = {}
        for table, type in ((holders, src), (wanters, dst)):
            for rank in ranks:
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


@given(redistributions(dst_partial=False))
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


@given(redistributions(), st.sampled_from([GLOO, NCCL]))
def test_seconds_are_the_sum_over_steps(pair, cost):
    found = plan(*pair, cost=cost)
    assert found.seconds == sum(seconds(step, cost) for step in found.steps)
    assert found.seconds >= 0
