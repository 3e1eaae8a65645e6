"""Ops under `vmap`, as `shard_map` in a traced function has them: keys of any kind, refusals."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fdtensor import Mesh, distribute, shard_map, spmd
from fdtensor.errors import FdtensorError
from fdtensor.runtime.simulator import SimulatedComm
from tests.support.local_functions import blocks, put

RANKS = 4
MESH = Mesh(x=RANKS)
COMM = SimulatedComm(MESH)
CUT = MESH.layout("x")


def traced(f):
    given = [distribute(t, CUT, COMM) for t in blocks(1, RANKS)]
    return spmd(lambda *ts: shard_map(lambda *own: f(*own).contiguous(), MESH, CUT, CUT)(*ts))(
        *given
    ).full()


def alone(f):
    return torch.cat([f(*own) for own in zip(*[t.chunk(RANKS) for t in blocks(1, RANKS)])])


KEYS = {
    "a list before": lambda x, y, i, j, k, m: put(x.clone(), ([0, 2], i[:2]), y[0, :2]),
    "a list after": lambda x, y, i, j, k, m: put(x.clone(), (i[:2], [0, 2]), 3.0),
    "a list of one": lambda x, y, i, j, k, m: put(x.clone(), ([1], i), 3.0),
    "an array": lambda x, y, i, j, k, m: put(x.clone(), (np.array([0, 2]), i[:2]), 3.0),
    "a number of numpy": lambda x, y, i, j, k, m: put(x.clone(), (np.int64(1), i), 3.0),
    "a range": lambda x, y, i, j, k, m: put(x.clone(), (range(2), i[:2]), 3.0),
    "True": lambda x, y, i, j, k, m: put(x.clone(), (True, i[:2]), 3.0),
    "True after": lambda x, y, i, j, k, m: put(x.clone(), (slice(None), i[:2], True), 3.0),
    "dims of 1 before": lambda x, y, i, j, k, m: put(x.clone(), (i[:1],), y[None, None, :1]),
    "those of a part": lambda x, y, i, j, k, m: put(
        x.clone(), (slice(None), i[:1]), y[None, :, :1]
    ),
    "an index without dims": lambda x, y, i, j, k, m: x.index_select(0, i[0]),
    "the last places": lambda x, y, i, j, k, m: x.take(i - 15),
    "one write at them": lambda x, y, i, j, k, m: x.put(i[:1] - 15, y[0, :1]),
}


@pytest.mark.parametrize("name", [*KEYS])
def test_a_key_of_any_kind_is_taken(name):
    assert torch.equal(traced(KEYS[name]), alone(KEYS[name]))


def test_of_equal_entries_of_a_bag_one_has_a_gradient():
    def f(x, y, i, j, k, m):
        def most(x):
            return F.embedding_bag(k, x, mode="max").sum()

        return torch.func.grad(most)(x.round())

    assert torch.equal(traced(f), alone(f))


def test_values_are_counted_where_kernels_count_them():
    def f(x, *_):
        return torch.histc(torch.linspace(-1, 1, 701) + 0 * x[0, 0].float(), 49, -0.7, 0.9)

    assert torch.equal(traced(f), alone(f))


REFUSED = [
    lambda x, y, i, j, k, m: torch.select_scatter(x, y[0], 0, 5),
    lambda x, y, i, j, k, m: x.take(i + 14),
    lambda x, y, i, j, k, m: x.take(i - 17),
    lambda x, y, i, j, k, m: x.put(i + 14, y[0, :4]),
    lambda x, y, i, j, k, m: F.embedding(i, x[:, 0]),
    lambda x, y, i, j, k, m: F.embedding(i, x, padding_idx=7),
    lambda x, y, i, j, k, m: F.embedding_bag(k, x, mode="min"),
    lambda x, y, i, j, k, m: F.embedding_bag(k, x, torch.tensor([0]), mode="sum"),
    lambda x, y, i, j, k, m: F.embedding_bag(k, x, mode="mean", per_sample_weights=y),
    lambda x, y, i, j, k, m: F.embedding_bag(k, x, mode="sum", per_sample_weights=y[:1]),
    lambda x, y, i, j, k, m: F.embedding_bag(k, x, mode="sum", per_sample_weights=y.float()),
    lambda x, y, i, j, k, m: F.embedding_bag(k, x.long(), mode="sum"),
    lambda x, y, i, j, k, m: F.embedding_bag(k[:, :0], x, mode="mean"),
    lambda x, y, i, j, k, m: torch.histc(x, 4, 5, -5),
    lambda x, y, i, j, k, m: torch.histc(x, 4, 0, float("inf")),
    lambda x, y, i, j, k, m: torch.histc(x.long(), 4, -5, 5),
    lambda x, y, i, j, k, m: x.index_fill(0, i, y[0]),
    lambda x, y, i, j, k, m: put(x.clone(), (m,), y[0]),
    lambda x, y, i, j, k, m: put(x.clone(), (m,), y[0, :0]),
    lambda x, y, i, j, k, m: x.index_put((x[:, 0] > 9,), y[:2], accumulate=True),
    lambda x, y, i, j, k, m: put(x.clone(), (m[:1],), 3.0),
    lambda x, y, i, j, k, m: x.index_put((m[:, :1],), y[0, 0]),
    lambda x, y, i, j, k, m: x.masked_scatter(m, y[0, :2]),
    lambda x, y, i, j, k, m: x.renorm(0, 0, 1.0),
    lambda x, y, i, j, k, m: x.clone().renorm_(2, 0, -1.0),
    lambda x, y, i, j, k, m: x.clone().cumsum_(0, dtype=torch.float32),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_torch_refuses_of_one_tensor_is_refused(number):
    f = REFUSED[number]
    with pytest.raises((RuntimeError, IndexError, ValueError, AssertionError)):
        alone(f)
    with pytest.raises((FdtensorError, RuntimeError, ValueError, AssertionError)):
        traced(f)


def test_operands_that_no_decomposition_takes_are_told():
    with pytest.raises(FdtensorError, match="nonzero_static in shard_map has no batching rule"):
        traced(lambda x, *_: torch.nonzero_static(x[0, 0], size=2))


def test_an_op_whose_decomposition_is_made_of_it_is_told():
    with pytest.raises(FdtensorError, match=r"histogram\S* in shard_map has no batching rule"):
        traced(lambda x, *_: torch.histogram(x.float(), 4, range=(0.0, 8.0))[0])
