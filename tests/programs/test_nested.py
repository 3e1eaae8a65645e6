"""The order in which axes cut one dim is chosen with the rest: what is priced is what is built."""

import itertools
import pickle

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor import Mesh, Replicate, Shard, TensorType, plan, trace
from fdtensor.layouts.tree import flatten
from fdtensor.ops.graph import Full
from fdtensor.ops.lift import layout_of
from fdtensor.plans.cost import NCCL, seconds
from fdtensor.plans.cost_parts import overlapped
from fdtensor.programs.assembly import assembled
from fdtensor.programs.bound.least import bound_of
from fdtensor.programs.bound.relaxation import Relaxation
from fdtensor.programs.choice import prices_of, total_seconds
from fdtensor.programs.mixtures import nodes_of
from fdtensor.programs.moves import nested_seconds
from fdtensor.programs.nested import Nested, layout_at, place_of
from fdtensor.programs.recording import recorded
from fdtensor.programs.tracer import is_typed
from tests.programs.optimum import drawn
from tests.support.depth import times

SEEDS = st.integers(0, 10**6)
SIZES = {"a": 2, "b": 2, "c": 3}
MESHES = [Mesh(**{a: SIZES[a] for a in order}) for order in itertools.permutations(SIZES)]


def test_a_gradient_does_not_reorder_what_is_cut_against_the_order_of_the_mesh():
    mesh = Mesh(a=2, b=2)
    x = TensorType((3, 4, 9), torch.float32, mesh.layout(("b", "a")))
    w = TensorType((9,), torch.float32, mesh.layout("a"))
    both = torch.func.grad(lambda x, w: (x.square() @ w).square().sum(), argnums=(0, 1))
    assert trace(both, x, w).received_bytes <= 180


@pytest.mark.parametrize("order", [("b", "c"), ("c", "b")])
def test_opposite_orders_of_two_dims_take_the_same_bytes_however_the_mesh_is_written(order):
    taken = set()
    for mesh in MESHES:
        x = TensorType((12, 12), torch.float32, mesh.layout(order))
        y = TensorType((12, 12), torch.float32, mesh.layout(None, order[::-1]))
        program = trace(torch.func.grad(lambda x, y: (x @ y).square().sum(), (0, 1)), x, y)
        taken.add((program.received_bytes, round(program.seconds, 9)))
    assert len(taken) == 1


@settings(max_examples=times(10, 300))
@given(seed=SEEDS)
def test_a_program_takes_no_more_than_was_chosen(seed):
    """Its moves are those that were priced, in the orders that were chosen."""
    case = drawn(seed)
    leaves, spec = flatten((case.types, {}), is_leaf=is_typed)
    graph = recorded(case, spec, leaves, case.types).graph
    program = assembled(graph, case.mesh, case.types, case.wants, NCCL, packed=False)
    origin = program.origin
    prices = attrs.evolve(prices_of(graph, case.mesh, NCCL, origin.constraints), nested=True)
    nodes = nodes_of(graph, [origin.choices], prices, origin.constraints)
    taken = [node.options[0] for node in nodes]
    total = total_seconds(nodes, taken, prices, frozenset())
    assert total == pytest.approx(origin.choices[case.mesh.axes[0]].seconds)
    moved = sum(seconds(step, overlapped(NCCL)) for step in program.steps)
    # a copy of a value may be made from another copy, which costs less than was priced
    assert moved <= total - sum(option.seconds for option in taken) + 1e-9


@st.composite
def moves(draw):
    """A value, a mesh, and two layouts of it, whose axes cut in random orders."""
    counts = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=2, max_size=3))
    mesh = Mesh(**{f"a{i}": n for i, n in enumerate(counts)})
    places = [Replicate(), Shard(0), Shard(1)]
    each = st.tuples(*[st.sampled_from(places)] * mesh.ndim)
    orders = st.permutations(mesh.axes)
    ends = [layout_of(mesh, draw(each), tuple(draw(orders))) for _ in range(2)]
    return TensorType((24, 144), torch.float32, ends[0]), ends[1]


@given(move=moves())
def test_a_move_takes_what_its_plan_takes(move):
    src, dst = move
    mesh, full = dst.mesh, Full(src.shape, src.dtype)
    due = sum(seconds(step, overlapped(NCCL)) for step in plan(src, dst).steps)
    ends = place_of(src.layout), place_of(dst)
    assert [layout_at(mesh, x) for x in ends] == [src.layout, dst]
    assert nested_seconds(full, mesh, *ends, NCCL, None) == pytest.approx(due, abs=2e-9)


def test_nested_places_are_told_from_plain_ones():
    mesh = Mesh(a=2, b=2)
    plain = place_of(mesh.layout(("a", "b")))
    other = place_of(mesh.layout(("b", "a")))
    assert isinstance(other, Nested)
    assert not isinstance(plain, Nested)
    assert plain != other
    assert other != plain
    assert len({plain, other, place_of(mesh.layout(("b", "a")))}) == 2
    assert pickle.loads(pickle.dumps(other)) == other


@pytest.mark.parametrize("choice", ["cheapest", "follow"])
@pytest.mark.parametrize("f", [torch.relu, lambda x: (x + 1).square(), torch.func.grad(torch.sum)])
def test_a_cut_dim_of_one_index_stays(f, choice):
    x = TensorType((1000, 1), torch.float32, Mesh(a=3).layout(None, "a"))
    assert trace(f, x, choice=choice).received_bytes == 0


@pytest.mark.parametrize("sizes", [{"a": 1, "b": 2, "c": 2}, {"b": 2, "d": 1, "c": 2, "e": 1}])
def test_axes_of_one_rank_add_nothing_to_choose_from(sizes):
    def best(mesh):
        x = TensorType((15, 12), torch.float32, mesh.layout(("c", "b")))
        choices = trace(lambda x: torch.cat([x, x]), x).origin.choices
        return bound_of(choices)

    alone, beside = best(Mesh(b=2, c=2)), best(Mesh(**sizes))
    assert beside.least == pytest.approx(alone.least)
    assert beside.chosen == pytest.approx(alone.chosen)


def test_orders_that_cost_next_to_nothing_are_not_tried_one_by_one(monkeypatch):
    solved, real = [], Relaxation.branches

    def branches(self):
        return (solved.append(1) or least for least in real(self))

    monkeypatch.setattr(Relaxation, "branches", branches)
    x = TensorType((3, 2), torch.float32, Mesh(a=2, b=2, c=2).layout())
    best = bound_of(trace(lambda x: torch.cat([x, x]), x).origin.choices)
    assert best.chosen == pytest.approx(best.least)
    assert len(solved) <= 2
