"""Laws of plans, on the simulated mesh."""

import itertools
import json
import re
import sys

import attrs
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fdtensor import (
    GLOO,
    NCCL,
    AllReduce,
    CostModel,
    Layout,
    LayoutError,
    Mesh,
    Partial,
    Plan,
    PlanError,
    Ragged,
    Replicate,
    Shard,
    SimulatedComm,
    Slice,
    StridedShard,
    TensorType,
    fuse,
    plan,
    run,
    trace,
    transition,
)
from fdtensor.plans.collectives import ReduceExchange, by_exchange
from fdtensor.plans.movement import movement
from fdtensor.plans.planner import _plan, by_layouts
from fdtensor.plans.routes import route
from fdtensor.plans.search import by_owners, same_everywhere
from fdtensor.testing.strategies import placements, redistributions
from fdtensor.testing.values import full_tensor, gather_full, scatter

R, S, P = Replicate(), Shard, Partial

seeds = st.integers(0, 999)
costs = st.sampled_from([GLOO, NCCL])
pairs = st.booleans().flatmap(lambda cross: redistributions(cross_mesh=cross))


def everyone(src: TensorType, dst: TensorType) -> list[int]:
    return sorted({*src.mesh.order, *dst.mesh.order})


def comm_of(src: TensorType, dst: TensorType) -> SimulatedComm:
    return SimulatedComm(Mesh(world=max(everyone(src, dst)) + 1))


def typed(shape, placements, mesh, dtype=torch.float32) -> TensorType:
    return TensorType(shape, dtype, Layout(mesh, placements))


@given(pairs, costs, seeds)
def test_a_plan_keeps_the_tensor(pair, cost, seed):
    src, dst = pair
    tensor = full_tensor(src, seed)
    moved = run(plan(src, dst, cost=cost), scatter(tensor, src, seed), comm_of(src, dst))
    assert torch.equal(gather_full(moved, dst), tensor)


@given(redistributions(dtype=torch.float64), seeds)
def test_a_plan_keeps_averages(pair, seed):
    src, dst = pair
    tensor = full_tensor(src, seed)
    moved = run(plan(src, dst), scatter(tensor, src, seed), comm_of(src, dst))
    assert torch.allclose(gather_full(moved, dst), tensor, rtol=0, atol=1e-9)


@given(pairs, costs, seeds)
def test_the_bytes_that_move_are_those_announced(pair, cost, seed):
    src, dst = pair
    found, comm = plan(src, dst, cost=cost), comm_of(src, dst)
    run(found, scatter(full_tensor(src, seed), src, seed), comm)
    announced = {rank: found.received_bytes_at(rank) for rank in everyone(src, dst)}
    assert {rank: comm.received[rank] for rank in announced} == announced
    assert found.received_bytes == max(announced.values())
    assert found.total_bytes == sum(announced.values())
    assert found.sent_bytes == max(found.sent_bytes_at(rank) for rank in announced)
    assert sum(map(found.sent_bytes_at, announced)) == found.total_bytes


@given(st.booleans().flatmap(lambda cross: redistributions(cross_mesh=cross, partial=False)), costs)
def test_movement_receives_the_lower_bound(pair, cost):
    found = plan(*pair, cost=cost)
    assert found.received_bytes == found.lower_bound_bytes


any_pairs = st.booleans().flatmap(lambda cross: redistributions(cross_mesh=cross, dtype=None))


@given(any_pairs, costs)
def test_no_plan_receives_less_than_the_bound(pair, cost):
    """All of them receive as much, but for a number, and where terms are both scaled and added."""
    src, dst = pair
    found = plan(src, dst, cost=cost)
    assert found.received_bytes >= found.lower_bound_bytes
    assert found.total_bytes >= found.least_total_bytes
    before, after = src.layout.partial, dst.layout.partial
    mixed = any(before.get(a, op) != op for a, op in after.items()) and after.keys() - before.keys()
    if src.shape and not mixed:
        assert found.total_bytes == found.least_total_bytes


def test_a_sum_of_numbers_takes_no_more_time_to_save_bytes():
    """Between meshes it meets at an owner where that is faster; along an axis ranks reduce it."""
    mesh = Mesh(dp=8, tp=8)
    number = TensorType((), torch.float32, mesh.layout(partial={"tp": "sum"}))
    assert [str(s.collective) for s in plan(number, mesh.layout()).steps] == [
        "all_reduce[axis=tp reduce_op=sum]"
    ]
    far = Mesh.from_ranks(torch.arange(64, 128), "r")
    there = number.with_layout(far.layout())
    assert plan(number, there).seconds <= by_layouts(number, there, NCCL).seconds


def test_terms_that_are_scaled_beside_new_ones_have_a_plan():
    mesh = Mesh(c=2, d=2, x=2)
    src = TensorType((4,), torch.float32, mesh.layout(partial={"d": "avg", "x": "avg"}))
    found = plan(src, mesh.layout(partial={"c": "sum", "x": "sum"}))
    full, comm = full_tensor(src, 1), comm_of(src, found.dst)
    assert torch.allclose(gather_full(run(found, scatter(full, src, 2), comm), found.dst), full)


def test_a_budget_that_owners_do_not_fit_is_met_by_layouts():
    mesh = Mesh(x=2, y=2)
    src = TensorType((4096, 16), torch.float32, mesh.layout("x", partial={"y": "sum"}))
    best = plan(src, mesh.layout("y"))
    assert isinstance(best.steps[0].collective, ReduceExchange)
    less = plan(src, mesh.layout("y"), max_bytes=best.peak_bytes - 1)
    assert less.peak_bytes < best.peak_bytes
    assert not any(isinstance(step.collective, ReduceExchange) for step in less.steps)


def test_a_plan_from_one_rank_is_verified_whatever_its_axes_of_one_are():
    src = TensorType((), torch.float32, Mesh(c=1).layout(partial={"c": "sum"}))
    plan(src, Mesh.from_ranks([1, 2, 3], "z").layout()).verify()


@given(pairs, costs)
def test_any_step_by_owners_runs_and_receives_what_it_says(pair, cost):
    """Also where the planner takes another one, of which named collectives are faster."""
    src, dst = pair
    steps = by_owners(src, dst) if src.numel and not same_everywhere(src, dst) else None
    if steps is not None:
        own = Plan(src, dst, steps, cost)
        own.verify()
        assert Plan.from_json(own.to_json()) is own
        assert own.total_bytes == own.least_total_bytes
        full, comm = full_tensor(src, 5), comm_of(src, dst)
        out = run(own, scatter(full, src, 6), comm)
        for rank in everyone(src, dst):
            assert comm.received[rank] == own.received_bytes_at(rank)
        assert sum(map(own.sent_bytes_at, everyone(src, dst))) == own.total_bytes
        assert torch.allclose(gather_full(out, dst), full)


@pytest.mark.parametrize("count", [2, 3, 5, 7])
def test_all_ranks_together_receive_whole_numbers_of_terms(count):
    """Of a scalar over 3 ranks each receives the mean, 10.67 B, and all of them 32 B, not 30."""
    mesh = Mesh(dp=1, tp=count)
    src = TensorType((), torch.int64, mesh.layout(partial={"tp": "sum"}))
    found = plan(src, mesh.layout())
    assert found.total_bytes == found.least_total_bytes == 16 * (count - 1)


@given(pairs)
def test_the_cost_model_does_not_change_the_bytes(pair):
    assume(pair[0].shape or not pair[0].layout.partial)  # of a number, time decides too
    assert plan(*pair, cost=GLOO).total_bytes == plan(*pair, cost=NCCL).total_bytes


@given(pairs, costs)
def test_json_gives_the_same_plan_back(pair, cost):
    found = plan(*pair, cost=cost)
    assert Plan.from_json(found.to_json()) is found
    assert eval(repr(found)) is found


@given(pairs, costs, st.data())
def test_every_plan_is_verified(pair, cost, data):
    """Of the planner, within a budget, backward, fused, and of the transitions of its axes."""
    found = plan(*pair, cost=cost)
    found.verify()
    fuse([found]).plans[0].verify()
    plan(*pair, cost=cost, max_bytes=found.peak_bytes).verify()
    src, dst = pair
    if {*src.layout.partial.values(), *dst.layout.partial.values()} <= {"sum", "avg"}:
        found.transpose().verify()
    if src.mesh.ndim:
        axis = data.draw(st.sampled_from(src.mesh.axes))
        to = data.draw(placements(src.shape, src.mesh.axis_size(axis), partial=["sum"]))
        try:
            end = src.placed(axis, to)
        except LayoutError:
            return
        Plan(src, end, transition(src, axis, to), cost).verify()


SUM = AllReduce(("dp",), "sum")
WRONG = {
    "no step": (lambda p: ()),
    "one step is left out": (lambda p: p.steps[1:]),
    "a step comes twice": (lambda p: (*p.steps, p.steps[-1])),
    "another reduction": (lambda p: (evolved(p, 0, reduce_op="max"), p.steps[1])),
    "another dim": (lambda p: (p.steps[0], evolved(p, 1, dims=(1,)))),
    "another axis": (lambda p: (evolved(p, 0, axes=("dp",)), p.steps[1])),
    "an axis that is not there": (lambda p: (evolved(p, 0, axes=("pp",)), p.steps[1])),
    "another kind": (lambda p: (p.steps[0], attrs.evolve(p.steps[1], collective=SUM))),
    "no step at all": (lambda p: (p.steps[0], p.steps[1].collective)),
    "another end": (lambda p: (p.steps[0], attrs.evolve(p.steps[1], dst=p.src))),
}  # fmt: skip


def evolved(found, i, **fields):
    """Step `i` of a plan with other fields of its collective."""
    step = found.steps[i]
    return attrs.evolve(step, collective=attrs.evolve(step.collective, **fields))


@pytest.mark.parametrize("steps", WRONG.values(), ids=list(WRONG))
def test_a_wrong_step_is_refused(steps):
    mesh = Mesh(dp=2, tp=4)
    found = plan(typed((8, 16), [S(0), P()], mesh), mesh.layout(None, "tp"))
    with pytest.raises(PlanError):
        Plan(found.src, found.dst, steps(found), found.cost).verify()


@pytest.mark.parametrize(
    "field", [{"pieces": 0}, {"pieces": 9}, {"pieces": 10**30}, {"way": "mail"}]
)
def test_an_exchange_is_cut_into_as_many_pieces_as_it_has_rows_at_most(field):
    mesh = Mesh(dp=2)
    step = by_exchange(typed((8, 5), [S(0)], mesh), typed((8, 5), [S(1)], mesh))
    Plan(step.src, step.dst, (step,), NCCL).verify()
    wrong = attrs.evolve(step, collective=attrs.evolve(step.collective, **field))
    with pytest.raises(PlanError, match=re.escape(str(wrong.collective))):
        Plan(step.src, step.dst, (wrong,), NCCL).verify()


def test_plans_of_the_largest_tensors_and_meshes_are_verified():
    """By their layouts alone: no block is made, and no rank visited."""
    mesh = Mesh(a=2**20, b=2**20, c=2**20)
    shape = (2**30 - 1, 2**31 - 1)
    factors = [StridedShard(0, 2**40), S(0), P()]
    for before, after in itertools.permutations([[S(0), S(1), P()], [S(1), S(0), R], factors], 2):
        src, dst = typed(shape, before, mesh, torch.int8), typed(shape, after, mesh, torch.int8)
        step = by_exchange(src, dst)
        found = Plan(src, dst, (step,), NCCL)
        try:
            Plan.from_json(found.to_json())
        except PlanError:
            assert P() in after
        wrong = Plan(src, dst, (attrs.evolve(step, collective=Slice((), ())),), NCCL)
        with pytest.raises(PlanError):
            wrong.verify()


@given(pairs)
def test_at_most_two_steps_need_traffic(pair):
    src, dst = pair
    found = plan(src, dst)
    assert sum(step.collective.__class__.__name__ not in LOCAL for step in found.steps) <= 2


LOCAL = ("Slice", "Mask", "Pad", "Scale")


@given(redistributions(dtype=torch.float64), seeds)
def test_the_transpose_is_the_adjoint(pair, seed):
    """<A x, y> == <x, A' y>, where x and y are full tensors."""
    src, dst = pair
    if {*src.layout.partial.values(), *dst.layout.partial.values()} - {"sum", "avg"}:
        with pytest.raises(PlanError, match="not linear"):
            plan(src, dst).transpose()
        return
    found = plan(src, dst)
    back, comm = found.transpose(), comm_of(src, dst)
    assert (back.src, back.dst) == (dst.cotangent(), src.cotangent())
    x, y = full_tensor(src, seed), full_tensor(dst, seed + 1)
    forward = gather_full(run(found, scatter(x, src, seed), comm), dst)
    backward = gather_full(run(back, scatter(y, back.src, seed), comm), back.dst)
    assert torch.equal((forward * y).sum(), (x * backward).sum())


@given(pairs, costs, seeds, st.floats(0, 1))
def test_a_memory_budget_is_kept_or_refused_with_the_least(pair, cost, seed, share):
    src, dst = pair
    free = plan(src, dst, cost=cost)
    with pytest.raises(PlanError, match="the least is") as refused:
        plan(src, dst, cost=cost, max_bytes=-1)
    least = int(str(refused.value).split("the least is ")[1].split(".")[0])
    budget = least + int(share * (free.peak_bytes - least))
    within = plan(src, dst, cost=cost, max_bytes=budget)
    assert within.peak_bytes <= budget
    assert within.total_bytes in (free.total_bytes, by_layouts(src, dst, cost).total_bytes)
    tensor, comm = full_tensor(src, seed), comm_of(src, dst)
    moved = run(within, scatter(tensor, src, seed), comm)
    assert torch.equal(gather_full(moved, dst), tensor)
    if least:
        with pytest.raises(PlanError, match=f"the least is {least}"):
            plan(src, dst, cost=cost, max_bytes=least - 1)


@pytest.mark.parametrize("mesh", [Mesh(a=4), Mesh(a=2, b=4), Mesh(a=2, b=2, c=2)], ids=str)
@pytest.mark.parametrize("shape", [(24, 16), (6144, 4096), (7, 5)], ids=str)
def test_the_census_is_at_the_minimum(mesh, shape):
    """Every pair of {R, S0, S1, P} and {R, S0, S1}: movement at the bound, the rest near it."""
    total = bound = 0
    for before in itertools.product([R, S(0), S(1), P()], repeat=mesh.ndim):
        for after in itertools.product([R, S(0), S(1)], repeat=mesh.ndim):
            found = plan(typed(shape, before, mesh), typed(shape, after, mesh))
            found.verify()
            if P() in before:
                total += found.total_bytes
                bound += found.least_total_bytes
            else:
                assert found.received_bytes == found.lower_bound_bytes
    even = shape != (7, 5)
    assert total <= (1.03 if even else 1.08) * bound


# --- speed, as counts ------------------------------------------------------------------------


def calls_of(function, *args) -> int:
    """How many Python functions are called."""
    count = 0

    def counting(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(counting)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count


def test_asking_again_gives_the_same_plan():
    mesh = Mesh(dp=2, tp=4)
    src = typed((8, 16), [S(0), P()], mesh)
    dst = mesh.layout(None, "tp")
    assert plan(src, dst) is plan(src, dst)
    assert calls_of(lambda: plan(src, dst)) <= 3


@pytest.mark.parametrize("after", [[R, R], [R, S(1)], [R, S(0)]], ids=str)
def test_planning_does_not_depend_on_axes_that_do_not_move(after):
    def planning(idle: int) -> int:
        mesh = Mesh(idle=idle, tp=4)
        src, dst = typed((64, 64), [R, S(0)], mesh), typed((64, 64), after, mesh)
        plan(src, dst)  # imports and caches of parts
        _plan.cache_clear()
        return calls_of(plan, src, dst)

    assert planning(1000) <= planning(2) * 1.1


def test_a_million_ranks():
    mesh = Mesh(a=1000, b=1000)
    src, dst = typed((4000, 4000), [S(0), S(1)], mesh), typed((4000, 4000), [S(1), S(0)], mesh)
    found = plan(src, dst)
    assert [str(step.collective) for step in found.steps] == [
        "exchange[axes=(a,b) way=peer_to_peer]"
    ]
    here = route(movement(src, dst), 123_456)
    assert [message.peer for message in here.recvs] == [456_123]
    gathered = plan(src, mesh.layout(None, "b"))
    assert gathered.received_bytes == 999 * 4 * 4 * 4
    assert found.received_bytes_at(123_456) == 4 * 4 * 4


# --- texts -----------------------------------------------------------------------------------


def test_the_text_of_a_plan():
    mesh = Mesh(dp=2, tp=4)
    src = typed((8, 16), [S(0), P()], mesh)
    assert str(plan(src, mesh.layout(None, "tp"))) == REDUCED
    assert str(plan(src, src)) == STILL
    uneven = typed((7, 5), [S(0), S(1)], mesh)
    assert str(plan(uneven, mesh.layout("tp", "dp"))) == UNEVEN
    other = Mesh.from_ranks([9, 8, 7], "x")
    assert str(plan(uneven, other.layout("x"))) == ACROSS
    ragged = typed((8, 16), [Ragged(0, (3, 5)), P("max")], mesh)
    assert str(plan(ragged, mesh.layout(None, ("tp", "dp")))) == RAGGED


def test_the_html_of_a_plan_has_the_facts_of_its_text():
    mesh = Mesh(dp=2, tp=4)
    found = plan(typed((8, 16), [S(0), P()], mesh), mesh.layout(None, "tp"))
    html = found._repr_html_()
    for fact in ("reduce_scatter[axis=tp dim=1 reduce_op=sum]", "192 B", "-&gt;", "bound", "256 B"):
        assert fact in html


def test_the_digest_is_the_same_everywhere():
    mesh = Mesh(dp=2, tp=4)
    found = plan(typed((8, 16), [S(0), P()], mesh), mesh.layout(None, "tp"))
    assert found.digest == DIGEST
    assert json.loads(found.to_json())["fdtensor"] == 2


def test_the_text_of_a_plan_error():
    mesh = Mesh(dp=2)
    src = typed((8, 16), [S(0)], mesh)
    with pytest.raises(PlanError) as error:
        plan(src, typed((8, 15), [S(0)], mesh))
    assert str(error.value) == OTHER_SHAPE
    with pytest.raises(PlanError) as error:
        plan(src, mesh.layout(), max_bytes=1000 - 500)
    assert str(error.value) == TOO_LITTLE
    step = plan(src, mesh.layout()).steps[0]
    wrong = attrs.evolve(step, collective=AllReduce(("dp",), "sum"))
    with pytest.raises(PlanError) as error:
        Plan(src, wrong.dst, (wrong,), NCCL).verify()
    assert str(error.value) == OTHER_STEP


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"fdtensor": 1}', "null", "plan", None, b"{}", 7, "[" * 10**6]
)
def test_another_text_is_no_plan(text):
    with pytest.raises(PlanError, match="this text is not a plan"):
        Plan.from_json(text)


def test_a_text_of_many_axes_or_dims_is_refused_at_once():
    tree = json.loads(plan(typed((8,), [S(0)], Mesh(x=2)), Mesh(x=2).layout()).to_json())
    count = 10**5
    axes = {"axes": [f"a{i}" for i in range(count)], "sizes": [1] * count, "ranks": [1]}
    dims = {**tree["types"][0], "shape": [2**62] * count}
    for changed in ({"meshes": [axes]}, {"types": [dims, dims]}):
        with pytest.raises(PlanError, match="this text is not a plan"):
            Plan.from_json(json.dumps({**tree, **changed}))


def test_a_text_is_refused_with_the_place_that_is_wrong():
    mesh = Mesh(dp=2, tp=4)
    tree = json.loads(plan(typed((8, 16), [S(0), P()], mesh), mesh.layout(None, "tp")).to_json())
    said = {
        "it is of version 1, and this reads 2": {**tree, "fdtensor": 1},
        "it has an unknown key, 'more'": {**tree, "more": 1},
        "it lacks 'cost'": {k: v for k, v in tree.items() if k != "cost"},
        "src is -1, in a table of 3": {**tree, "src": -1},
        "dst is True, not an int": {**tree, "dst": True},
        "steps is None, not a list": {**tree, "steps": None},
        "steps[0] is no step of a kind": {**tree, "steps": [{**tree["steps"][0], "kind": "Step"}]},
        "-1.0 is no price": {**tree, "cost": {**tree["cost"], "latency": -1}},
        "a key comes twice": '{"fdtensor":1,"fdtensor":1}',
        "NaN is no number": '{"fdtensor":NaN}',
    }
    for sentence, text in said.items():
        with pytest.raises(PlanError, match=re.escape(sentence)):
            Plan.from_json(text if isinstance(text, str) else json.dumps(text))


@pytest.mark.parametrize("price", [-1, float("nan"), float("inf"), "1", None, True, 10**400])
@pytest.mark.parametrize("field", ["latency", "bandwidth", "copy", "flops"])
def test_prices_are_finite_numbers(field, price):
    with pytest.raises(PlanError, match="is no price"):
        attrs.evolve(NCCL, **{field: price})
    with pytest.raises(PlanError, match="is no price"):
        attrs.evolve(NCCL, launch=[("", price)])
    with pytest.raises(PlanError, match="is no table"):
        attrs.evolve(NCCL, slowdown=[price])
    assert attrs.evolve(NCCL, copy=10**12) is NCCL
    assert isinstance(CostModel("x", 0, 1, 1, 1, [["", 1]], []).latency, float)


def test_rows_of_a_model_have_names_of_their_own():
    twice = [("x", 1e-6, 1e9), ("x", 1e-6, 2e9)]
    with pytest.raises(PlanError, match="'x' has two rows"):
        attrs.evolve(NCCL, axes=twice)
    with pytest.raises(PlanError, match="'bf17' is no dtype"):
        attrs.evolve(NCCL, flops=[("", 1e12), ("bf17", 1e15)])
    with pytest.raises(PlanError, match="has no flops"):
        attrs.evolve(NCCL, flops=())
    long = attrs.evolve(NCCL, flops=[("", 1e12), ("bfloat16", 1e15)])
    assert long.flops_of(torch.bfloat16) == 1e15


def test_what_costs_nothing_has_a_price():
    free = attrs.evolve(NCCL, slowdown=[("", 0)])
    type = TensorType((64, 64), torch.float32, Mesh(x=2).layout("x"))
    assert trace(lambda a: (a @ a).sum(0), type, cost=free).seconds >= 0


REDUCED = """\
f32[8@dp,16]{sum:tp} -> f32[8,16@tp] on Mesh(dp=2, tp=4)
  reduce_scatter[axis=tp dim=1 reduce_op=sum]  f32[8@dp,16@tp]  192 B
  all_gather[axis=dp dim=0]                    f32[8,16@tp]      64 B
2 steps, 256 B received per rank"""

STILL = """\
f32[8@dp,16]{sum:tp} -> f32[8@dp,16]{sum:tp} on Mesh(dp=2, tp=4)
0 steps, 0 B received per rank"""

UNEVEN = """\
f32[7@dp,5@tp] -> f32[7@tp,5@dp] on Mesh(dp=2, tp=4)
  exchange[axes=(dp,tp) way=peer_to_peer]  f32[7@tp,5@dp]  24 B
1 step, 24 B received per rank"""

ACROSS = """\
f32[7@dp,5@tp] on Mesh(dp=2, tp=4) -> f32[7@x,5] on Mesh.from_ranks([9, 8, 7], ('x',))
  exchange[way=peer_to_peer]  f32[7@x,5]  60 B
1 step, 60 B received per rank"""

RAGGED = """\
f32[8@dp:3:5,16]{max:tp} -> f32[8,16@(tp,dp)] on Mesh(dp=2, tp=4)
  exchange[axes=(dp,tp) reduce_op=max way=all_to_all]  f32[8,16@(tp,dp)]  232 B
1 step, 232 B received per rank"""

DIGEST = "4b386d429376e18603ff7659569c4322"

OTHER_SHAPE = """\
a plan moves a tensor, it does not change it from f32[8, 16] to f32[8, 15].

  src: f32[8@dp,16]
  dst: f32[8@dp,15]

Give both types the same shape and dtype."""

TOO_LITTLE = """\
no plan fits in 500 bytes per rank: the least is 768.

  src:         f32[8@dp,16]
  dst:         f32[8,16]
  source:      256 bytes
  destination: 512 bytes

Pass max_bytes=768 or more, or choose layouts with smaller blocks."""

OTHER_STEP = """\
all_reduce[axis=dp reduce_op=sum] is not what takes f32[8@dp,16] to f32[8,16].

  which: step 0
  mesh:  Mesh(dp=2) to Mesh(dp=2)
  right: all_gather[axis=dp dim=0]

Make plans with plan(src, dst), or by Plan.from_json of what to_json returned."""
