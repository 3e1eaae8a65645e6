"""Functions that a rank computes alone, in `shard_map` of a traced function: nothing moves."""

import pytest
import torch

from fdtensor import Mesh, distribute, shard_map, spmd, trace
from fdtensor.layouts.errors import TraceError
from fdtensor.runtime.simulator import SimulatedComm
from tests.support.local_functions import LOCAL, blocks, local_function

pytestmark = [  # of torch's own
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:index_reduce.. is in beta"),
]

RANKS = 4
MESH = Mesh(x=RANKS)
COMM = SimulatedComm(MESH)
CUT = MESH.layout("x")


def functions(text):
    """A function on all ranks, and the derivatives of its squares by both tensors."""
    mapped = shard_map(local_function(text), MESH, CUT, CUT)

    def inside(*tensors):
        return mapped(*tensors)

    def derivatives(x, y, *rest):
        def loss(x, y):
            return (mapped(x, y, *rest) ** 2).sum() + 0 * (x.sum() + y.sum())

        return torch.func.grad(loss, (0, 1))(x, y)

    return inside, derivatives


def of_each(f, tensors):
    """What torch gives for each rank, one after the other."""
    each = [f(*own) for own in zip(*[t.chunk(RANKS) for t in tensors], strict=True)]
    if isinstance(each[0], tuple):
        return [torch.cat(parts) for parts in zip(*each, strict=True)]
    return [torch.cat(each)]


def squares(text):
    """The derivatives of the squares of the function of one rank."""
    f = local_function(text)

    def loss(x, y, *rest):
        return (f(x, y, *rest) ** 2).sum() + 0 * (x.sum() + y.sum())

    return torch.func.grad(loss, (0, 1))


def received(f, choice, outs):
    types = [distribute(t, CUT, COMM).type for t in blocks(0, RANKS)]
    layouts = (CUT,) * outs if outs > 1 else CUT
    program = trace(f, *types, choice=choice, out_layouts=layouts, check_indices=False)
    return program.received_bytes


@pytest.mark.few(40)
@pytest.mark.parametrize("text", LOCAL)
def test_what_a_rank_computes_alone_moves_nothing(text):
    for outs, f in enumerate(functions(text), 1):
        for choice in ("follow", "cheapest"):
            assert received(f, choice, outs) == 0


@pytest.mark.few(30)
@pytest.mark.parametrize("text", LOCAL)
def test_it_gives_what_it_gives_alone(text):
    tensors = blocks(1, RANKS)
    given = [distribute(t, CUT, COMM) for t in tensors]
    inside, derivatives = functions(text)
    (wanted,) = of_each(local_function(text), tensors)
    torch.testing.assert_close(inside(*given).full(), wanted)
    torch.testing.assert_close(spmd(inside)(*given).full(), wanted)
    got = spmd(derivatives)(*given)
    for ours, own in zip(got, of_each(squares(text), tensors), strict=True):
        torch.testing.assert_close(ours.full(), own)


SHARED = torch.zeros(3, 5, dtype=torch.float64)


def test_a_write_to_what_all_ranks_share_is_told():
    def f(x):
        SHARED.add_(x)
        return x

    given = distribute(blocks(0, RANKS)[0], CUT, COMM)
    with pytest.raises(TraceError, match="one for all ranks"):
        spmd(lambda x: shard_map(f, MESH, CUT, CUT)(x))(given)
