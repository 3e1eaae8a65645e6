"""Runs of calls that one op says better: scans that go from the end."""

import pytest
import torch

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Full
from fdtensor.ops.recorder import record
from fdtensor.ops.rewrite import BACKWARD_SCANS, rewritten
from fdtensor.programs.tracer import trace
from fdtensor.runtime.runner import run_lines
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.testing.row_checks import verify
from fdtensor.testing.values import block, scatter
from tests.support.decompositions import differences
from tests.support.nested import nested

aten = torch.ops.aten
SCANS = list(BACKWARD_SCANS.values())
SAMPLES = [
    (torch.arange(n * 3.0).reshape(n, 3) - 4, dim) for n in (1, 4, 5, 6, 8) for dim in (0, 1, -1)
]


def from_end(x):
    return x.flip(0).cumsum(0).flip(0)


def turned_elsewhere(x):
    return x.flip(1).cumsum(0).flip(0)


def cast(x):
    return x.flip(0).cumsum(0, dtype=torch.float64).flip(0)


def test_a_scan_between_two_flips_is_one_op():
    graph = rewritten(record(lambda x: [from_end(x[0])], [Full((4, 3), torch.float32)]))
    assert [call.op for call in graph.calls] == [BACKWARD_SCANS[aten.cumsum.default]]


@pytest.mark.parametrize("f", [turned_elsewhere, cast])
def test_other_flips_stay(f):
    graph = rewritten(record(lambda x: [f(x[0])], [Full((4, 3), torch.float32)]))
    assert not {call.op for call in graph.calls} & set(SCANS)


@pytest.mark.parametrize("op", SCANS, ids=str)
def test_scans_from_the_end_hold_on_blocks(op):
    assert not verify(op, SAMPLES)
    assert not [*nested(op, SAMPLES[4])]


@pytest.mark.parametrize("op", SCANS, ids=str)
def test_scans_from_the_end_by_blocks(op):
    assert not differences(op, SAMPLES, blocks=4)
    assert not differences(op, SAMPLES, blocks=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 5, 2])
def test_they_send_what_blocks_come_to(dtype, size):
    mesh = Mesh(x=4)
    full = torch.randint(0, 2, (size, 16)).to(dtype)
    type = TensorType((size, 16), dtype, Layout(mesh, [Shard(0)]))

    program = trace(from_end, type)
    (made,) = run_lines(program, [scatter(full, type, 0)], SimulatedComm(mesh))

    (out,) = program.out_types
    for rank, local in enumerate(made):
        assert torch.equal(local, block(from_end(full), out, rank))


def test_the_gradient_of_a_scan_sends_what_blocks_come_to():
    type = TensorType((256, 64), torch.float32, Layout(Mesh(x=4), [Shard(0)]))

    def loss(x, w):
        return (x.cumsum(0) * w).sum()

    program = trace(torch.func.grad(loss), type, type)

    assert program.received_bytes < 8 * 64 * 4, program
    text = str(program.to_fx(1).graph)
    assert "cumsum" in text
    assert "from_end" not in text


def test_a_count_of_bools_that_becomes_a_float_is_counted_as_one():
    """So that it may wait with other sums; not where floats could not hold it."""
    mesh = Mesh(x=4)

    def ops(size, dtype):
        x = TensorType((size,), torch.float32, mesh.layout("x"))
        program = trace(lambda x: (x > 0).sum().to(dtype), x)
        return [eqn.op for eqn in program.eqns]

    cast = torch.ops.aten._to_copy.default
    assert cast not in ops(1 << 20, torch.float32)
    assert cast in ops(1 << 25, torch.float32)
    assert cast not in ops(1 << 25, torch.float64)
    assert cast in ops(1 << 10, torch.float16)
