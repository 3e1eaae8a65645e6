"""The choice on all axes at once: near the best there is, however the mesh is written."""

import itertools
import math

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdtensor import (
    Layout,
    Mesh,
    Partial,
    Replicate,
    Shard,
    SimulatedComm,
    StridedShard,
    TensorType,
    call,
    distribute,
    like,
    plan,
    trace,
)
from fdtensor.layouts.placement import Placement
from fdtensor.ops.graph import Full
from fdtensor.plans import search
from fdtensor.plans.cost import GLOO, H100, NCCL, seconds
from fdtensor.plans.cost_parts import overlapped
from fdtensor.programs import by_size
from fdtensor.programs.moves import IMPOSSIBLE, move_seconds
from fdtensor.programs.rough_moves import about_seconds
from fdtensor.programs.rounding import stages
from tests.bench.choice_cases import CASES


def test_two_axes_change_together():
    """Rows go to `b`, columns stay with `a`: no axis alone does better than to gather."""
    mesh = Mesh(a=2, b=4)
    x = TensorType((2048, 512), torch.float32, mesh.layout(None, "a"))
    w = TensorType((512, 2048), torch.float32, mesh.layout(None, "a"))
    program = trace(lambda x, w: (torch.relu(w), x @ w), x, w, out_layouts=like(None))
    assert [str(step.collective) for step in program.collectives] == ["all_gather[axis=a dim=1]"]
    assert program.received_bytes == 2048 * 512 * 4 // 8


def test_two_axes_never_cut_one_dim_each_by_sizes_of_its_own():
    """Each axis alone leaves the parts of the result where they are, of a length of their own."""
    mesh = Mesh(x=1, y=2, z=2)
    comm = SimulatedComm(mesh)
    a = distribute(torch.arange(5.0), mesh.layout("y"), comm)
    b = distribute(torch.arange(5.0).bfloat16(), mesh.layout(("x", "y", "z")), comm)
    assert torch.equal(call(torch.block_diag, a, b).full(), torch.block_diag(a.full(), b.full()))


def mlp(x, up, down):
    return (torch.relu(x @ up) @ down).square().mean()


def on(sizes):
    """The types of an MLP's arguments on a mesh of these axes: cut by the data and by the model."""
    mesh = Mesh(**dict(sizes))
    batch = tuple(a for a in ("pod", "dp") if a in mesh.axes)  # in this order on each mesh
    x = TensorType((1024, 256), torch.float32, mesh.layout(batch))
    up = TensorType((256, 2048), torch.float32, mesh.layout(None, "tp"))
    down = TensorType((2048, 256), torch.float32, mesh.layout("tp"))
    return x, up, down


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 4}, {"pod": 2, "dp": 4, "tp": 2}])
def test_a_mesh_may_be_written_in_any_order(sizes):
    orders = list(itertools.permutations(sizes.items()))
    gradient = torch.func.grad(mlp, (1, 2))
    programs = [trace(gradient, *on(order)) for order in orders]
    assert len({program.received_bytes for program in programs}) == 1
    assert max(p.seconds for p in programs) == pytest.approx(min(p.seconds for p in programs))
    for program in programs[1:]:
        for ours, theirs in zip(program.out_types, programs[0].out_types):
            assert all(ours.layout[axis] == theirs.layout[axis] for axis in sizes)


def test_a_layer_of_llama_takes_as_few_bytes_in_either_order():
    case = CASES[1]
    first, second = (trace(case.f, *case.types(mesh)) for mesh in case.meshes[1:3])
    assert first.received_bytes == second.received_bytes < 760_000_000


@st.composite
def moves(draw):
    """A value, a mesh of several axes, and placements of it before and after."""
    counts = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    mesh = Mesh(**{f"a{i}": n for i, n in enumerate(counts)})
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 12, 24, 5]), min_size=1, max_size=3)))
    shards = [Shard(d) for d in range(len(shape))]
    before = st.sampled_from([Replicate(), Partial("sum"), *shards])
    after = st.sampled_from([Replicate(), *shards])
    src = tuple(draw(before) for _ in counts)
    dst = tuple(draw(after) for _ in counts)
    return Full(shape, torch.float32), mesh, src, dst


@given(move=moves())
def test_a_move_takes_no_less_than_is_said_at_least(move):
    full, mesh, src, dst = move
    least = about_seconds(full, mesh.sizes, src, dst, NCCL)
    assert least <= move_seconds(full, mesh, src, dst, NCCL, None) * (1 + 1e-9) or uneven(move)


def uneven(move):
    """Whether blocks differ in size, or one dim is cut by several axes: bytes are not exact."""
    full, mesh, src, dst = move
    for side in (src, dst):
        for d, n in enumerate(full.shape):
            cuts = [size for size, p in zip(mesh.sizes, side) if p == Shard(d)]
            if len(cuts) > 1 or any(n % size for size in cuts):
                return True
    return False


@given(move=moves())
def test_a_move_that_all_axes_make_takes_what_its_plan_takes(move):
    full, mesh, src, dst = move
    moving = [p != q for n, p, q in zip(mesh.sizes, src, dst) if n > 1]
    even = all(n % mesh.size == 0 for n in full.shape)
    if all(moving) and moving and even:
        layouts = [Layout(mesh, side) for side in (src, dst)]
        steps = plan(TensorType(full.shape, full.dtype, layouts[0]), layouts[1]).steps
        due = sum(seconds(step, overlapped(NCCL)) for step in steps)
        got = move_seconds(full, mesh, src, dst, NCCL, None)
        assert got == pytest.approx(due, rel=0.5, abs=2e-9)
        assert got < IMPOSSIBLE


@st.composite
def even_moves(draw):
    """A move whose blocks are even, along one axis or two, and sizes of its first dim."""
    counts = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=2))
    mesh = Mesh(**{f"a{i}": n for i, n in enumerate(counts)})
    sizes = st.sampled_from([1, 2, 3, 8, 35]).map(lambda n: n * mesh.size)
    shape = tuple(draw(st.lists(sizes, min_size=1, max_size=4)))
    cuts: list[Placement] = [Shard(d) for d in range(len(shape))]
    if len(counts) == 1:
        factors = st.sampled_from([f for f in (2, 3) if not shape[0] % (f * mesh.size)] or [1])
        cuts.append(StridedShard(0, draw(factors)))
    before, after = [Replicate(), Partial("sum"), *cuts], [Replicate(), *cuts]
    src, dst = (tuple(draw(st.sampled_from(x)) for _ in counts) for x in (before, after))
    many = draw(st.lists(st.sampled_from([1, 2, 5, 64, 4096]), min_size=1, max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.int8]))
    return [Full((shape[0] * n, *shape[1:]), dtype) for n in many], mesh, src, dst


@given(move=even_moves(), cost=st.sampled_from([NCCL, GLOO, H100]))
def test_even_moves_take_what_their_plans_take_whatever_their_size(move, cost):
    fulls, mesh, src, dst = move
    moving = [p != q for p, q in zip(src, dst)]
    dims = [p.dim for side in (src, dst) for p in side if isinstance(p, (Shard, StridedShard))]
    if all(moving) and len({*dims}) == len(dims):
        layouts = [Layout(mesh, side) for side in (src, dst)]
        for full in fulls:
            p = plan(TensorType(full.shape, full.dtype, layouts[0]), layouts[1], cost=cost)
            due = sum(seconds(step, overlapped(cost)) for step in p.steps)
            got = move_seconds(full, mesh, src, dst, cost, None)
            assert got == pytest.approx(due, rel=1e-9, abs=2e-9)


@st.composite
def moves_of_all_axes(draw):
    """A move along all axes; each dim is divided by some of them, and two may cut the same."""
    counts = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3))
    mesh = Mesh(**{f"a{i}": n for i, n in enumerate(counts)})
    some = st.lists(st.sampled_from([1, 2, 3, 5, 16, *counts]), max_size=4).map(math.prod)
    shape = tuple(draw(st.lists(some, min_size=1, max_size=4)))
    cuts: list[Placement] = [Shard(d) for d in range(len(shape))]
    kinds = st.sampled_from([Replicate(), Partial("sum"), *cuts])
    pairs = st.tuples(kinds, kinds).filter(lambda pair: pair[0] != pair[1])
    src, dst = zip(*[draw(pairs) for _ in counts], strict=True)
    return Full(shape, draw(st.sampled_from([torch.float32, torch.int8]))), mesh, src, dst


@given(move=moves_of_all_axes(), cost=st.sampled_from([NCCL, GLOO, H100]))
def test_a_move_of_even_blocks_takes_what_its_plan_takes(move, cost):
    full, mesh, src, dst = move
    sizes, before, after = by_size.essential(full.shape, mesh, src, dst)
    if by_size.least_shape(sizes, mesh, before, after) is not None:
        ends = [TensorType(full.shape, full.dtype, Layout(mesh, side)) for side in (src, dst)]
        p = plan(*ends, cost=cost)
        due = sum(seconds(step, overlapped(cost)) for step in p.steps)
        got = move_seconds(full, mesh, src, dst, cost, None)
        assert got == pytest.approx(due, rel=1e-8, abs=2e-9)


@given(move=even_moves(), cost=st.sampled_from([NCCL, GLOO, H100]), data=st.data())
def test_and_where_sums_of_halves_wait_in_float32(move, cost, data):
    fulls, mesh, src, dst = move
    src = (Partial("sum"), *src[1:])
    dims = [p.dim for side in (src, dst) for p in side if isinstance(p, (Shard, StridedShard))]
    if all(p != q for p, q in zip(src, dst)) and len({*dims}) == len(dims):
        full = attrs.evolve(data.draw(st.sampled_from(fulls)), dtype=torch.bfloat16)
        ends = [TensorType(full.shape, full.dtype, Layout(mesh, side)) for side in (src, dst)]
        parts = stages(*ends, torch.float32, cost)
        due = sum(seconds(step, overlapped(cost)) for part in parts for step in part.steps)
        got = move_seconds(full, mesh, src, dst, cost, torch.float32)
        assert got == pytest.approx(due, rel=1e-9, abs=2e-9)


def test_a_move_of_many_sizes_is_searched_once(monkeypatch):
    searched = []

    def alternatives(*ends):
        searched.append(ends)
        return search.alternatives(*ends)

    monkeypatch.setattr(by_size, "alternatives", alternatives)
    cost = attrs.evolve(NCCL, name="one search")  # which no other test has asked for
    ends = (Partial("sum"),), (Replicate(),)
    for n in (5, 400, 3, 7000, 60, 1):
        move_seconds(Full((8 * n, 7), torch.float32), Mesh(few=4), *ends, cost, None)
    assert len(searched) == 1


@given(move=even_moves(), order=st.randoms(use_true_random=False))
def test_a_price_does_not_depend_on_what_was_asked_before(move, order):
    fulls, mesh, src, dst = move
    shuffled = order.sample(fulls, len(fulls))
    n = next(_apart)
    one, other = (attrs.evolve(GLOO, name=f"{side} {n}") for side in ("one", "other"))
    prices = {full: move_seconds(full, mesh, src, dst, one, None) for full in fulls}
    for full in shuffled:
        assert move_seconds(full, mesh, src, dst, other, None) == prices[full]


_apart = itertools.count()
"""A number for each example: no two share what is known of their cost models."""
