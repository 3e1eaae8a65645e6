"""What a training step of the GPT sends: what an expert would write for each layout, or less.

The programs are those of an accelerator with named collectives (the NCCL costs). Sizes are chosen
so that the expert's way is the cheapest: many tokens where batches are cut, few where weights are.
"""

from collections import Counter

import pytest

from fdtensor.layouts.mesh import Mesh
from fdtensor.plans.cost import NCCL
from fdtensor.programs.buckets import BUCKET_BYTES
from fdtensor.train.gpt import Size
from fdtensor.train.job import Job, program, types

LAYERS = 2
N = 4
SIZE = Size(layers=LAYERS)
TABLE = 256 * SIZE.width * 4
"""The bytes of the tied embedding."""

SMALL = 16 * 1024
"""What losses, norms and vectors of one layer stay below."""


def parameters(mesh):
    return sum(t.nbytes for t in types(Job(SIZE), mesh)[0].values())


def activation(batch):
    return batch * SIZE.length * SIZE.width * 4


def step(mesh, batch, **options):
    return program(Job(SIZE, batch=batch), mesh, cost=NCCL, **options)


def kinds(found):
    return Counter(str(c.collective).partition("[")[0] for c in found.collectives)


def sent(collective):
    """The bytes that a rank puts in: of its blocks before."""
    steps = getattr(collective, "steps", (collective,))
    return sum(s.src.local_nbytes(s.src.mesh.order[0]) for s in steps)


def test_data_parallel_reduces_each_gradient_once():
    """All gradients are all-reduced once, in buckets; besides those the loss and the norm."""
    mesh = Mesh(dp=N)
    found = step(mesh, 64)
    buckets = -(-parameters(mesh) // BUCKET_BYTES)
    assert set(kinds(found)) == {"all_reduce"}
    assert kinds(found)["all_reduce"] <= buckets + 1 + 2
    moved = 2 * parameters(mesh) * (N - 1) // N
    assert moved <= found.received_bytes <= moved + 64


def test_tensor_parallel_reduces_twice_a_layer_each_way():
    """Megatron: after attention and after the MLP in the forward, before each in the backward."""
    found = step(Mesh(tp=N), 2)
    reduced = [c for c in found.collectives if str(c.collective).startswith("all_reduce")]
    large = [c for c in reduced if sent(c) >= activation(2)]
    assert len(large) == 4 * LAYERS
    rest = [c for c in found.collectives if c not in large]
    assert sum(map(sent, rest)) <= TABLE // N + SMALL  # the table once, the norm of the gradients
    expert = 4 * LAYERS * 2 * activation(2) * (N - 1) // N + TABLE * (N - 1) // N
    assert found.received_bytes <= expert + SMALL


def test_sequence_parallel_scatters_where_tensor_parallel_reduces():
    """Each all-reduce becomes a reduce-scatter and an all-gather; no activation is all-reduced."""
    found = step(Mesh(sp=N), 16)
    for c in found.collectives:
        if str(c.collective).startswith("all_reduce"):
            assert sent(c) <= SMALL
    pairs = 4 * LAYERS * 2 * activation(16) * (N - 1) // N
    assert found.received_bytes <= pairs + 2 * TABLE + SMALL


@pytest.mark.parametrize("regather", [False, True])
def test_sharded_parameters_are_gathered_by_group_and_gradients_scattered(regather):
    """ZeRO-3: an all-gather of each group, again in the backward if told to; one reduce-scatter."""
    mesh = Mesh(fsdp=N)
    found = step(mesh, 64, regather=regather)
    groups = -(-parameters(mesh) // BUCKET_BYTES) + 1
    assert kinds(found)["all_gather"] <= groups * (1 + regather)
    assert kinds(found)["reduce_scatter"] <= groups
    once = parameters(mesh) * (N - 1) // N
    third = TABLE * regather  # the table is read at both ends of the forward, and in the backward
    assert found.received_bytes <= once * (2 + regather) + third + 64
    assert set(kinds(found)) == {"all_gather", "reduce_scatter", "all_reduce"}
    small = [c for c in found.collectives if str(c.collective).startswith("all_reduce")]
    assert sum(map(sent, small)) <= 64


def test_parameters_that_are_gathered_again_take_less_memory():
    mesh = Mesh(fsdp=N)
    kept, freed = (step(mesh, 64, regather=r) for r in (False, True))
    assert freed.peak_bytes < kept.peak_bytes
    assert freed.received_bytes > kept.received_bytes


def test_data_and_tensor_parallel_send_what_both_alone_would():
    """Over tp the activations of half the batch, over dp the gradients of half the weights."""
    mesh = Mesh(dp=2, tp=2)
    found = step(mesh, 8)
    over_tp = 4 * LAYERS * 2 * (activation(8) // 2) // 2 + TABLE
    over_dp = parameters(mesh) // 2 + TABLE
    assert found.received_bytes <= over_tp + over_dp + SMALL
