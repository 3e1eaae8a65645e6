"""The table of collectives: a file each, in which all that is known of it stands."""

import re
from math import prod
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, settings

import fdtensor
from fdtensor import (
    GLOO,
    NCCL,
    Broadcast,
    Mesh,
    Partial,
    Plan,
    Replicate,
    Shard,
    SimulatedComm,
    Step,
    TensorType,
    plan,
    run,
)
from fdtensor.plans.collectives import ALL, AllGather, by_exchange, by_meetings, is_local
from fdtensor.plans.collectives.even import Even
from fdtensor.plans.memory import peak_at
from fdtensor.plans.transitions import named
from fdtensor.plans.wire import from_wire, to_wire
from fdtensor.runtime.funcol_lowering import lower_steps
from fdtensor.testing import redistributions
from fdtensor.testing.values import full_tensor, scatter
from tests.support.depth import times

PACKAGE = Path(fdtensor.__file__).parent
MESH = Mesh(dp=2, tp=2)


def typed(placement, shape=(4, 8), mesh=MESH) -> TensorType:
    """f64, with `placement` along the last axis and Replicate along the others."""
    placements = [Replicate()] * (mesh.ndim - 1) + [placement]
    return TensorType(shape, torch.float64, fdtensor.Layout(mesh, placements))


ENDS = {
    "Slice": (typed(Replicate()), typed(Shard(1))),
    "Mask": (typed(Replicate()), typed(Partial("sum"))),
    "Pad": (typed(Shard(0)), typed(Partial("max"))),
    "Scale": (typed(Partial("sum")), typed(Partial("avg"))),
    "AllGather": (typed(Shard(1)), typed(Replicate())),
    "AllToAll": (typed(Shard(0)), typed(Shard(1))),
    "AllReduce": (typed(Partial("avg")), typed(Replicate())),
    "ReduceScatter": (typed(Partial("sum")), typed(Shard(1))),
    "Broadcast": (
        typed(Replicate(), mesh=Mesh.from_ranks([2], ("one",))),
        typed(Replicate(), mesh=Mesh(all=4)),
    ),
    "Exchange": (typed(Shard(0), (5, 7)), typed(Shard(1), (5, 7))),
    "ReduceExchange": (
        TensorType((5, 7), torch.float64, MESH.layout("dp", partial={"tp": "sum"})),
        TensorType((5, 7), torch.float64, MESH.layout("tp")),
    ),
}
"""For each kind types between which it goes."""


def example(kind) -> Step:
    src, dst = ENDS[kind.__name__]
    match kind.__name__:
        case "Exchange":
            return by_exchange(src, dst)
        case "ReduceExchange":
            return by_meetings(src, dst)
        case _:
            return Step(named(src, dst), src, dst)


def test_each_file_has_one_collective_and_each_collective_a_file():
    files = {path.stem for path in (PACKAGE / "plans" / "collectives").glob("*.py")}
    shared = {"__init__", "base", "local", "even", "rounds", "delivery", "buffers", "course"}
    names = {re.sub(r"(?<=.)(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in ALL}
    assert files - shared == set(names)
    for file, kind in names.items():
        assert kind.name == file
        assert kind.__module__ == f"fdtensor.plans.collectives.{file}"
        assert getattr(fdtensor.plans, kind.__name__) is kind
    assert {kind.__name__ for kind in ALL} == set(ENDS)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_a_collective_says_all_that_is_asked_of_it(kind):
    step = example(kind)
    assert isinstance(step.collective, kind)
    assert str(step.collective).startswith(f"{kind.name}[")
    alone = Plan(step.src, step.dst, (step,), NCCL)
    alone.verify()
    assert Plan.from_json(alone.to_json()) is alone
    ranks = {*step.src.mesh.order, *step.dst.mesh.order}
    received = [alone.received_bytes_at(rank) for rank in ranks]
    assert max(received) == alone.received_bytes
    assert sum(received) == alone.total_bytes == sum(map(alone.sent_bytes_at, ranks))
    assert bool(alone.received_bytes) is not is_local(step)
    assert alone.peak_bytes >= max(
        type.local_nbytes(rank) for type in (step.src, step.dst) for rank in type.mesh.order
    )
    assert all(attrs.evolve(alone, cost=cost).seconds > 0 for cost in (GLOO, NCCL))


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_a_collective_does_to_blocks_what_its_types_say(kind):
    step = example(kind)
    alone = Plan(step.src, step.dst, (step,), NCCL)
    full = full_tensor(step.src, 1)
    comm = SimulatedComm(Mesh(all=4))
    out = run(alone, tuple(scatter(full, step.src, 2)), comm)
    assert comm.calls == ({} if is_local(step) else {kind.name: 1})
    for rank in comm.mesh.order:
        assert comm.received[rank] == alone.received_bytes_at(rank)
    assert torch.equal(fdtensor.DTensor(tuple(out), step.dst, comm).full(), full)


@pytest.mark.parametrize("kind", [k for k in ALL if k is not Broadcast], ids=lambda k: k.__name__)
def test_a_rank_calls_one_functional_collective_or_none(kind):
    """Each call with its wait; two all-to-alls where terms meet at owners."""
    step, calls = example(kind), 2 if kind.__name__ == "ReduceExchange" else 1
    for rank in step.src.mesh.order:
        ops = [call.op.namespace for call in lower_steps((step,), rank).calls]
        assert ops.count("_c10d_functional") == (0 if is_local(step) else 2 * calls)


@given(redistributions(dtype=torch.float32, partial={"max", "min"}, dst_partial=False))
@settings(max_examples=times(100, 3000))
def test_a_reduction_that_no_backend_has_holds_what_the_exchanges_in_its_place_do(types):
    for step in plan(*types, cost=NCCL).steps:
        kind = step.collective
        if isinstance(kind, Even) and kind.wire_op(step, "gloo") is None:
            for rank in step.src.mesh.order:
                working = kind.working_numel(step, rank, owned=False) * step.src.dtype.itemsize
                assert step.src.local_nbytes(rank) + working == peak_at(
                    kind.as_exchanges(step), rank
                )


def test_a_kind_of_ones_own_runs_as_those_of_the_table():
    """One that is not in the table: what a new file says is enough to price, run and lower it."""

    @attrs.frozen(eq=False)
    class RingGather(AllGather):
        """An all_gather that asks its neighbours only."""

        name = "ring_gather"

        def copied(self, step: Step, moved: int) -> int:
            return 7 * moved

    src, dst = ENDS["AllGather"]
    step = Step(RingGather(("tp",), (1,)), src, dst)
    comm = SimulatedComm(MESH)
    own = Plan(src, dst, (step,), NCCL)
    full = full_tensor(src, 3)
    out = run(own, tuple(scatter(full, src, 4)), comm)
    assert all(torch.equal(block, full) for block in out)
    assert comm.calls == {"ring_gather": 1}
    assert str(step.collective) == "ring_gather[axis=tp dim=1]"
    assert own.received_bytes == prod(dst.shape) * 8 // 2
    assert own.seconds != Plan(src, dst, (Step(named(src, dst), src, dst),), NCCL).seconds
    assert [c.op for c in lower_steps((step,), 0).calls] == [
        c.op for c in lower_steps((Step(named(src, dst), src, dst),), 0).calls
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["max", "min"])
def test_floats_travel_as_integers_in_their_order(dtype, name):
    """Of all pairs, those of every NaN, infinity and zero among them."""
    numbers = [0.0, -0.0, 1.5, -2.5, 1e-40, -1e-40, 3e38, -3e38, *map(float, ("inf", "-inf"))]
    nan = torch.tensor([float("nan")], dtype=dtype)
    some = torch.cat([torch.tensor(numbers, dtype=dtype), nan, nan.neg()])
    keys, reduce = to_wire(some, name), getattr(torch, f"{name}imum")
    assert some.signbit()[-2:].unique().numel() == 2
    assert not keys.is_floating_point()

    alike = from_wire(keys.clone(), dtype, name)
    assert alike.view(keys.dtype).equal(some.view(keys.dtype))
    reduced = from_wire(reduce(keys[:, None], keys), dtype, name)
    wanted = reduce(some[:, None], some)
    assert torch.equal(reduced.isnan(), wanted.isnan())
    assert torch.equal(reduced.nan_to_num(7.0), wanted.nan_to_num(7.0))
