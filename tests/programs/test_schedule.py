"""A schedule has the lines of its program in an order that takes no longer, and gives the same."""

from collections import Counter

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor import Mesh, TensorType, constrain, trace
from fdtensor.layouts.tree import flatten
from fdtensor.plans.cost import GLOO, H100, NCCL
from fdtensor.programs.bundles import bundled
from fdtensor.programs.listing import Listing, Way
from fdtensor.programs.memory import bytes_held, lines_of
from fdtensor.programs.options import Options
from fdtensor.programs.schedule import LARGEST, ROOM, in_time, scheduled
from fdtensor.programs.seconds import line_seconds
from fdtensor.programs.timeline import timeline
from fdtensor.programs.tracer import traced
from fdtensor.runtime.all_ranks import run_lines
from fdtensor.runtime.lines import Begun, ended
from fdtensor.runtime.local_program import Spelling, local_program
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.testing.strategies import layouts
from fdtensor.testing.values import scatter
from tests.bench.overlap import in_order
from tests.support.depth import times

MESHES = (Mesh(a=3), Mesh(a=2), Mesh(a=3), Mesh(a=2, b=2))
WINDOW = st.sampled_from([1, 3, 16, 256])
PRIORITY = st.sampled_from(["turn", "need"])
DEAR = attrs.evolve(NCCL, name="dear", flops=1e4, copy=1e6)  # work takes longer than what is sent
COSTS = (NCCL, H100, GLOO, DEAR, attrs.evolve(DEAR, name="balanced", latency=1e-4))


def loss(params, x):
    for w, v in params:
        x = x + torch.relu(x @ w) @ v
    return x.pow(2).sum()


@st.composite
def programs(draw):
    """The gradient of a few layers whose parameters lie anyhow, as no schedule has seen it."""
    mesh = draw(st.sampled_from(MESHES))
    layers = draw(st.integers(1, 4 if len(mesh.axes) == 1 else 1))

    def matrix():
        return TensorType((8, 8), torch.float64, draw(layouts(mesh, (8, 8), partial=False)))

    params, x = [(matrix(), matrix()) for _ in range(layers)], matrix()
    leaves, spec = flatten(((params, x), {}))
    options = Options(regather=draw(st.booleans()))
    cost = draw(st.sampled_from(COSTS))
    step = torch.func.grad(loss)
    return traced(step, spec, leaves, leaves, options, cost=cost, packed=False).program


def values_of(program):
    """Small integers for the inputs of a program, as blocks of all ranks."""
    generator = torch.Generator().manual_seed(0)
    return [
        scatter(torch.randint(-2, 3, type.shape, generator=generator).to(type.dtype), type, i)
        for i, type in enumerate(program.in_types)
    ]


@settings(max_examples=times(12, 2000))
@given(programs())
def test_a_schedule_has_the_same_lines_and_gives_the_same(program):
    before = bundled(program, 200)
    after = scheduled(before)
    assert Counter(before.eqns) == Counter(after.eqns)
    values, comm = values_of(program), SimulatedComm(program.mesh)
    for a, b in zip(run_lines(before, values, comm), run_lines(after, values, comm), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@settings(max_examples=times(12, 2000))
@given(programs())
def test_a_schedule_takes_no_longer_and_holds_little_more(program):
    before = bundled(program, 200)
    after = scheduled(before)
    assert timeline(after, program.cost).seconds <= timeline(before, program.cost).seconds
    gathered = [s.dst for s in before.steps if not s.moves.reduced]
    largest = max([type.local_nbytes(0) for type in gathered], default=0)
    assert after.peak_bytes_at(0) <= (1 + ROOM) * before.peak_bytes_at(0) + LARGEST * largest


@settings(max_examples=times(12, 1000))
@given(
    programs(), st.builds(Way, st.sampled_from([1, 3, 16, 256]), PRIORITY, PRIORITY, st.booleans())
)
def test_each_order_is_one_of_all_lines_after_their_operands(program, way):
    lines = lines_of(program, (0,))
    seconds = [line_seconds(lines.types, eqn, program.cost) for eqn in lines.eqns]
    listing = Listing(lines, seconds)
    order = listing.order(way, listing.releases(bytes_held(lines), 1 << 40))
    assert sorted(order) == list(range(len(lines.eqns)))
    attrs.evolve(program, eqns=tuple(lines.eqns[i] for i in order))  # it checks itself
    computing = [i for i in order if not lines.eqns[i].is_collective]
    if way.window == 1 and not any(map(_of_inputs_alone(program), computing)):
        assert computing == sorted(computing)


def _of_inputs_alone(program):
    """Whether a line reads no more than inputs, and so may come early with a gather."""
    inputs = set(program.inputs)
    return lambda i: inputs.issuperset(program.eqns[i].ins)


@settings(max_examples=times(8, 500))
@given(programs(), st.floats(0.0, 0.3))
def test_a_schedule_keeps_to_its_budget(program, more):
    lines = lines_of(program, tuple(program.mesh.ranks))
    most = int(bytes_held(lines).max() * (1 + more))
    after = in_time(lines, lambda _: most, program.cost)
    assert bytes_held(after).max() <= most


def mlp(params, x):
    for up, down in params:
        x = x + torch.relu(x @ up) @ down
    return x.float().square().mean()


def fsdp(rows, cost, **options):
    """The gradient of six layers whose parameters lie in shards."""
    mesh = Mesh(fs=8)
    cut = mesh.layout("fs")
    shapes = ((2048, 8192), (8192, 2048))
    params = [tuple(TensorType(s, torch.bfloat16, cut) for s in shapes) for _ in range(6)]
    x = TensorType((rows, 2048), torch.bfloat16, cut)
    return trace(torch.func.grad(mlp), params, x, cost=cost, **options)


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("cost", [NCCL, H100])
@pytest.mark.parametrize("rows", [16384, 65536, 262144])
def test_shards_of_parameters_are_gathered_behind_the_work_of_others(regather, cost, rows):
    """Only the first gather, the last reduction and what compute cannot hide are waited for."""
    times = timeline(fsdp(rows, cost, regather=regather), cost)
    sent = [line.seconds for line in times.lines if line.eqn.is_collective]
    ideal = max(0.0, times.sending - times.computing)
    assert times.exposed <= 1.05 * ideal + sent[0] + sent[-1] + 0.05 * times.computing


def test_a_regathered_layer_is_dropped_before_the_next_but_one_is_gathered():
    """Two gathered values more are held at most than without any overlap."""
    program = fsdp(65536, NCCL, regather=True)
    weight = 2048 * 8192 * 2
    late = in_order(program)
    assert program.peak_bytes <= (1 + ROOM) * late.peak_bytes + LARGEST * weight
    assert timeline(program, NCCL).seconds < 0.7 * timeline(late, NCCL).seconds


def test_without_more_memory_an_order_that_holds_more_is_left():
    lines = lines_of(unscheduled(fsdp(16384, NCCL, regather=True)), (0,))
    peak = bytes_held(lines).max()
    larger, within = (in_time(lines, lambda _, n=n: n, NCCL) for n in (2 * peak, peak))
    assert bytes_held(larger).max() > bytes_held(within).max() == peak
    assert taken(lines) > taken(within) > taken(larger)


def unscheduled(program):
    """The program with reductions at once, and what else is sent just before it is read."""
    late = in_order(program)
    reduced = [e for e in late.eqns if e.is_collective and e.steps[0].moves.reduced]
    eqns = []
    for eqn in late.eqns:
        if eqn not in reduced:
            eqns += [eqn, *(sent for sent in reduced if set(sent.ins) & set(eqn.outs))]
    return attrs.evolve(program, eqns=tuple(eqns))


def taken(lines):
    """The seconds that lines take in their order."""
    seconds = [line_seconds(lines.types, eqn, NCCL) for eqn in lines.eqns]
    return Listing(lines, seconds).seconds_of(range(len(seconds)))


def test_an_exchange_is_begun_where_it_stands_and_waited_for_where_it_is_read():
    mesh = Mesh(a=2, b=2)
    x = TensorType((64, 64), torch.float64, mesh.layout("a"))

    def f(x, y, z):
        moved = x.sum(0)
        return (y @ z.t()).relu().sum(), moved

    program = trace(f, x, x, x, out_layouts=(mesh.layout(), mesh.layout("b")), cost=GLOO)
    lines = local_program(program, 0, Spelling("gloo", "cpu", exchanges=False)).lines
    begun = [i for i, line in enumerate(lines) if isinstance(line.op, Begun)]
    waits = {line.args[0]: i for i, line in enumerate(lines) if line.op is ended}
    assert begun
    assert all(waits[lines[i].outs[0]] > i + 1 for i in begun)


def test_what_arrives_is_waited_for_and_put_together_where_it_is_read():
    mesh = Mesh(x=4)
    columns = TensorType((64, 64), torch.float32, mesh.layout(None, "x"))
    rows = TensorType((64, 64), torch.float32, mesh.layout("x"))

    def f(x, y):
        whole = constrain(x, mesh.layout())
        y = torch.tanh(y)
        return whole * 1, y

    program = trace(f, columns, rows, out_layouts=(mesh.layout(), mesh.layout("x")))
    lines = local_program(program, 0, Spelling("gloo", "cpu", exchanges=False)).lines
    ops = [str(line.op) for line in lines]
    assert any("all_gather" in op for op in ops)
    assert ops.index("aten.tanh.default") < next(i for i, op in enumerate(ops) if "wait" in op)
