"""Small collectives travel together, and nothing else changes."""

import attrs
import pytest
import torch

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten
from fdtensor.plans.collectives import is_local
from fdtensor.plans.cost import GLOO, NCCL
from fdtensor.programs.bundles import bundled
from fdtensor.programs.options import Options
from fdtensor.programs.program import Together
from fdtensor.programs.tracer import trace, traced
from fdtensor.runtime.all_ranks import run_lines
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.testing.values import scatter

MESH = Mesh(dp=3)


def typed(shape, placement):
    return TensorType(shape, torch.float64, Layout(MESH, [placement]))


def loss(params, x):
    for w, b in params:
        x = torch.relu(x @ w + b)
    return x.pow(2).sum()


def step(params, x):
    grads, value = torch.func.grad_and_value(loss)(params, x)
    new = [tuple(p - 0.5 * g for p, g in zip(ps, gs)) for ps, gs in zip(params, grads)]
    return new, value


def made(placement, cost=NCCL):
    """The program of a step with the parameters in this placement, nothing bundled yet."""
    params = [(typed((6, 6), placement), typed((6,), placement)) for _ in range(3)]
    cost = attrs.evolve(cost, flops=1e3, copy=1e6)  # work is dear: the batch stays cut
    leaves, spec = flatten(((params, typed((600, 6), Shard(0))), {}))
    return traced(step, spec, leaves, leaves, Options(), cost=cost, packed=False).program


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
@pytest.mark.parametrize("cost", [NCCL, GLOO])
@pytest.mark.parametrize("bucket_bytes", [0, 500, 1 << 20])
def test_bundles_keep_values_and_bytes(placement, cost, bucket_bytes):
    before = made(placement, cost)
    after = bundled(before, bucket_bytes)
    generator = torch.Generator().manual_seed(0)
    values = []
    for i, type in enumerate(before.in_types):
        full = torch.randint(-2, 3, type.shape, generator=generator).double()
        values.append(scatter(full, type, i))
    first, then = (run_lines(p, values, SimulatedComm(MESH)) for p in (before, after))
    for a, b in zip(first, then, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert after.received_bytes == before.received_bytes
    assert after.out_types == before.out_types


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_the_reductions_of_many_gradients_are_one(placement):
    before, after = made(placement), bundled(made(placement))
    reductions = [s for s in before.steps if getattr(s.collective, "reduce_op", None)]
    reductions = [s for s in reductions if not is_local(s)]
    assert len(reductions) >= 6
    kind = "all_reduce" if isinstance(placement, Replicate) else "reduce_scatter"
    together = [c for c in after.collectives if isinstance(c, Together)]
    assert max(len(c.steps) for c in together if str(c).startswith(kind)) >= 3


def test_a_bucket_holds_no_more_than_it_may():
    after = bundled(made(Replicate()), 400)
    for c in after.collectives:
        if isinstance(c, Together):
            assert sum(s.src.local_nbytes(0) for s in c.steps) <= 400


def test_what_inputs_are_gathered_to_comes_in_groups():
    after = bundled(made(Shard(0)))
    gathers = [c for c in after.collectives if str(c.collective).startswith("all_gather")]
    assert len(gathers) == 1


def sizes_of_groups(start, layers=16, rows=256):
    """The bytes of each all-reduce of the gradients, where one starts in so many seconds."""
    cost = attrs.evolve(NCCL, latency=0.0, launch=[("", start)], bandwidth=1e9, flops=1e9)
    mesh = Mesh(dp=2)
    w = TensorType((rows, 1024), torch.float32, mesh.layout())
    x = TensorType((1 << 18, rows), torch.float32, mesh.layout("dp"))
    types = [w] * layers, x
    program = trace(torch.func.grad(wide), *types, cost=cost)
    return [sum(s.src.local_nbytes(0) for s in steps_of(c)) for c in program.collectives]


def wide(ws, x):
    return sum((x @ w).sin().sum() for w in ws)


def steps_of(line):
    return line.steps if isinstance(line, Together) else (line,)


def test_the_dearer_a_start_the_larger_the_groups():
    """1 MiB, 6 starts at 1 GB/s, half of all."""
    assert sizes_of_groups(1e-6) == [1 << 20] * 16
    assert sizes_of_groups(3.6e-4) == [2 << 20] * 8
    assert sizes_of_groups(1.0) == [8 << 20] * 2


def test_all_that_is_little_goes_at_once():
    assert sizes_of_groups(1e-6, layers=8, rows=32) == [1 << 20]
