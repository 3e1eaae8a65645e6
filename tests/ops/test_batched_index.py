"""Indices of which each entry of a `vmap` has its own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdtensor import Mesh, call, distribute, shard_map, spmd, trace
from fdtensor.errors import FdtensorError, IndexRangeError
from fdtensor.ops.batched_index import ADDED, COPIED, TAKEN
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.testing.row_checks import verify

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's own

MESH = Mesh(x=4)
COMM = SimulatedComm(MESH)
CUT = MESH.layout("x")


def own(i):
    """Three places that differ, of indices."""
    return (i[0] + torch.arange(3)) % 3


def written(x, key, value):
    x = x.clone()
    x[key] = value
    return x


FORMS = {
    "x[i]": lambda x, i, s: x[i],
    "x[:, i]": lambda x, i, s: x[:, i],
    "x[i] of two dims": lambda x, i, s: x[i.unflatten(0, (2, -1))],
    "x[i], below 0": lambda x, i, s: x[i - 2],
    "index_select": lambda x, i, s: x.index_select(0, i),
    "index_select, last": lambda x, i, s: torch.index_select(x, -1, i),
    "index_add": lambda x, i, s: x.index_add(0, i, s, alpha=3),
    "index_add to zeros": lambda x, i, s: torch.zeros_like(x).index_add(0, i, s),
    "index_add, dim 1": lambda x, i, s: x.mT.index_add(1, i, s.mT),
    "index_add_": lambda x, i, s: x.clone().index_add_(0, i, s, alpha=2),
    "index_copy": lambda x, i, s: x.index_copy(0, own(i), s[:3]),
    "index_copy_, dim 1": lambda x, i, s: x.mT.clone().index_copy_(1, own(i)[:2], s[:2].mT),
    "x[i] = s": lambda x, i, s: written(x, own(i)[:2], s[1:3]),
    "x[:, i] = s": lambda x, i, s: written(x.mT, (slice(None), own(i)), s[:3].mT).mT,
    "x[i] = number": lambda x, i, s: written(x, i, 3.0) * s[:3],
}


def tensors(ranks, seed, columns=3):
    chance = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, (ranks, 3, columns), generator=chance).double()
    index = torch.randint(3, (ranks, 6), generator=chance)
    source = torch.randint(-4, 5, (ranks, 6, columns), generator=chance).double()
    return x, index, source


@given(st.sampled_from([*FORMS]), st.integers(0, 99))
def test_each_rank_has_indices_of_its_own(form, seed):
    f = FORMS[form]
    x, index, source = (t.flatten(0, 1) for t in tensors(4, seed))
    given = [distribute(t, CUT, COMM) for t in (x, index, source)]

    def inside(*args):
        return shard_map(lambda *own: f(*own).contiguous(), MESH, CUT, CUT)(*args)

    assert trace(inside, *given).received_bytes <= 24  # of counts of indices out of range
    wanted = shard_map(lambda *own: f(*own).contiguous(), MESH, CUT, CUT)(*given)
    assert torch.equal(spmd(inside)(*given).full(), wanted.full())


@given(st.sampled_from([*FORMS]), st.integers(0, 99))
def test_derivatives_are_those_of_torch(form, seed):
    f = FORMS[form]
    x, index, source = tensors(3, seed)

    def loss(x, index, source):
        return (torch.func.vmap(f)(x, index, source) ** 3).sum()

    def each(x, index, source):
        return torch.func.vmap(torch.func.grad(lambda *own: (f(*own) ** 3).sum(), (0, 2)))(
            x, index, source
        )

    wanted = torch.func.grad(loss, (0, 2))(x, index, source)
    types = [distribute(t, MESH.layout(), COMM) for t in (x, index, source)]
    for gradients in (torch.func.grad(loss, (0, 2)), each):
        for a, b in zip(call(gradients, *types), wanted, strict=True):
            assert torch.equal(a.full(), b)


@pytest.mark.parametrize("dims", [(0, 0, 0), (None, 0, 0), (0, 0, None), (1, 1, 1)])
@pytest.mark.parametrize("form", ["x[i]", "index_add to zeros", "index_select"])
def test_what_is_not_mapped_is_the_same_for_all(form, dims):
    f = FORMS[form]
    args = [
        t[0] if d is None else t.movedim(0, d) for t, d in zip(tensors(3, 0), dims, strict=True)
    ]
    mapped = torch.func.vmap(f, dims)
    given = [distribute(t, MESH.layout(), COMM) for t in args]
    assert torch.equal(call(mapped, *given).full(), mapped(*args))


def test_maps_within_maps():
    args = [torch.stack([t, t + 1]) % 3 for t in tensors(3, 0)]
    given = [distribute(t, MESH.layout(), COMM) for t in args]
    for f in FORMS.values():
        wanted = [[f(*[t[a, b] for t in args]) for b in range(3)] for a in range(2)]
        got = call(torch.func.vmap(torch.func.vmap(f)), *given)
        assert torch.equal(got.full(), torch.stack([*map(torch.stack, wanted)]))


@pytest.mark.parametrize("form", ["x[i]", "index_select", "index_add"])
def test_an_index_out_of_range_is_told_as_it_is_of_one_tensor(form):
    f = FORMS[form]
    x, index, source = (t.flatten(0, 1) for t in tensors(4, 0))
    index[7] = 3
    given = [distribute(t, CUT, COMM) for t in (x, index, source)]
    with pytest.raises(IndexRangeError, match="1 entry where it must not be: index of index"):
        spmd(shard_map(lambda *own: f(*own), MESH, CUT, CUT))(*given)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, i, s: x.index_add(0, i, s[:2]),
        lambda x, i, s: x.index_copy(0, i, s[:, :2]),
        lambda x, i, s: x.index_select(0, i[None]),
        lambda x, i, s: x.index_add(0, i, s.float()),
        lambda x, i, s: written(x, i, s.long()),
    ],
)
def test_what_torch_refuses_is_refused(f):
    given = [distribute(t.flatten(0, 1), CUT, COMM) for t in tensors(4, 0)]
    mapped = shard_map(f, MESH, CUT, CUT)
    with pytest.raises((RuntimeError, IndexError)):
        mapped(*given)
    with pytest.raises((FdtensorError, RuntimeError)):
        spmd(lambda *args: mapped(*args))(*given)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("wraps", [False, True])
def test_the_rows_are_right(count, wraps):
    x, index, source = tensors(4, 0)
    assert verify(TAKEN, [(x, index, wraps)], count=count) == []
    assert verify(ADDED, [(x, index, source, wraps)], count=count) == []
    places = torch.stack([torch.tensor([2, 0, 1]) for _ in x])
    assert verify(COPIED, [(x, places, source[:, :3], wraps)], count=count) == []
