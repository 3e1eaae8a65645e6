"""Random numbers on real ranks: those of one process, whatever the layout."""

import pytest
import torch

from fdtensor import (
    Layout,
    Mesh,
    Partial,
    Ragged,
    Replicate,
    Shard,
    StridedShard,
    TensorType,
    connect,
    distribute,
    random,
)

MESH = Mesh(dp=2, tp=2)

LAYOUTS = [
    ((5, 6), [Shard(0), Shard(1)]),
    ((7,), [Shard(0), Shard(0)]),
    ((6, 3), [StridedShard(0, 3), Replicate()]),
    ((5, 2), [Ragged(0, (4, 1)), Replicate()]),
    ((1, 4), [Shard(0), Replicate()]),
    ((), [Replicate(), Replicate()]),
]


def drawn():
    """For each layout and draw, whether all of it is what one process draws."""
    comm, key = connect(MESH), random.key(7)
    found = []
    for shape, placements in LAYOUTS:
        type = TensorType(shape, torch.float32, Layout(MESH, placements))
        for draw in (random.uniform, random.normal):
            found.append(torch.equal(draw(key, type, comm).full(), draw(key, shape)))
    x = torch.arange(15.0).reshape(3, 5)
    whole = random.dropout(key, x, 0.5)
    for placements in ([Shard(0), Shard(1)], [Partial(), Replicate()]):
        held = distribute(x, Layout(MESH, placements), comm)
        found.append(torch.equal(random.dropout(key, held, 0.5).full(), whole))
    held = distribute(x / 15, Layout(MESH, [Shard(1), Shard(0)]), comm)
    found.append(torch.equal(random.bernoulli(key, held).full(), random.bernoulli(key, x / 15)))
    for dim in (0, 1):
        order = random.permutation(key, held, dim=dim).full()
        found.append(torch.equal(order, random.permutation(key, x / 15, dim=dim)))
    order = TensorType((9,), torch.int64, MESH.layout(("tp", "dp")))
    found.append(
        torch.equal(random.permutation(key, order, comm).full(), random.permutation(key, 9))
    )
    return found


@pytest.mark.mesh
def test_real_ranks_draw_what_one_process_draws(pool4):
    for found in pool4.run(drawn):
        assert len(found) == 18
        assert all(found)
