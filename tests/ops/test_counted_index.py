"""Indices of which some count the dim that they are for: a block needs that block of the rest."""

import pytest
import torch

from fdtensor import Mesh, TensorType, call, distribute, trace
from fdtensor.ops.counted_index import LOOKED_UP, PUT
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.testing.row_checks import verify

MESH = Mesh(x=2, y=2)


def ints(*shape):
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(0)).double()


def below(size, *shape):
    return torch.randint(-size, size, shape, generator=torch.Generator().manual_seed(1))


def count(size, *after):
    return torch.arange(size).reshape(size, *[1] * len(after))


SAMPLES = [  # a tensor, the indices, and the dims that they count
    (ints(6, 4), [count(6), below(4, 6)], [0]),
    (ints(6, 4, 3), [count(6), below(4, 6)], [0]),
    (ints(6, 4, 3), [count(6, 1), below(4, 6, 5)], [0]),
    (ints(6, 4, 3), [count(6, 1), None, below(3, 6, 5)], [0]),
    (ints(2, 6, 4), [None, count(6, 1), below(4, 5)], [1]),
    (ints(5, 6, 4), [count(5, 1), count(6), below(4, 5, 6)], [0, 1]),
    (ints(6, 6), [count(6), count(6)], [0]),
    (ints(6, 4), [below(6, 4), count(4)], [1]),
]


@pytest.mark.parametrize("number", range(len(SAMPLES)))
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_rows_are_right(number, ranks):
    x, indices, counting = SAMPLES[number]
    assert verify(LOOKED_UP, [(x, indices, counting)], count=ranks) == []
    values = ints(*torch.ops.aten.index.Tensor(x, indices).shape)
    for of in (values, values[:1], ints()):
        assert verify(PUT, [(x, indices, of, True, counting)], count=ranks) == []
    assert verify(PUT, [(x, indices, ints(), False, counting)], count=ranks) == []


def bytes_of(f, *shapes):
    types = [TensorType(shape, dtype, MESH.layout(("x", "y"))) for shape, dtype in shapes]
    return trace(f, *types, choice="follow", check_indices=False).received_bytes


ROWS, LABELS = ((8, 5), torch.float64), ((8,), torch.int64)


@pytest.mark.parametrize(
    ("f", "moves"),
    [
        (lambda x, i: x[torch.arange(8), i], False),
        (lambda x, i: x[torch.arange(0, 8), i], False),
        (lambda x, i: x[torch.arange(8)[:, None], i[:, None]], False),
        (lambda x, i: x.index_put((torch.arange(8), i), x[:, 0], accumulate=True), False),
        (lambda x, i: torch.func.grad(lambda x: x[torch.arange(8), i].sum())(x), False),
        (lambda x, i: x[torch.arange(7, -1, -1), i], True),
        (lambda x, i: x[torch.arange(1, 9) - 1, i], True),
        (lambda x, i: x[torch.arange(0, 16, 2) // 2, i], True),
    ],
)
def test_the_entry_of_each_row_is_where_the_row_is(f, moves):
    assert (bytes_of(f, ROWS, LABELS) > 0) == moves
    x, i = ints(8, 5), below(5, 8)
    comm, cut = SimulatedComm(MESH), MESH.layout(("x", "y"))
    given = [distribute(t, cut, comm) for t in (x, i)]
    torch.testing.assert_close(call(f, *given).full(), f(x, i))
