"""Parts at places that 0-d tensors say: as torch takes them, on any layout, and what is refused."""

import pytest
import torch

import fdtensor as fd
from fdtensor import Mesh, SimulatedComm, distribute, spmd
from fdtensor.errors import DataDependentError, IndexRangeError, TraceError

MESH = Mesh(a=2)
COMM = SimulatedComm(MESH)
X = torch.arange(24.0).reshape(4, 6)
MASK = torch.tensor([True, False, True, True])


def written(x, *entries, value):
    x = x.clone()
    x[entries] = value
    return x


def tripled(x, j):
    y = x * 2
    y[j] = 3 * y[j]
    return y


PARTS = {
    "row": lambda x, j: x[j],
    "tuple": lambda x, j: x[(j,)],
    "column": lambda x, j: x[:, j],
    "last": lambda x, j: x[..., j],
    "both": lambda x, j: x[j, j],
    "around": lambda x, j: x[j, ..., j],
    "part of a row": lambda x, j: x[j, 1:3],
    "new dims": lambda x, j: x[None, j, None],
    "beside a list": lambda x, j: x[j, [0, 1]],
    "of a view": lambda x, j: x.mT[1:][j],
    "select": lambda x, j: x.select(-1, j),
    "narrow": lambda x, j: x.narrow(1, j * 2, 2),
    "narrow of torch": lambda x, j: torch.narrow(x, 0, j, 1),
    "a derivative": lambda x, j: torch.func.grad(lambda x: (x[j] ** 2).sum())(x),
    "in a vmap": lambda x, j: torch.func.vmap(lambda v: v[j])(x),
    "a derivative of a write": lambda x, j: torch.func.grad(
        lambda x: written(x * x, j, value=3 * x[j]).square().sum()
    )(x),
    "a derivative of a write of each": lambda x, j: torch.func.grad(
        lambda x: torch.func.vmap(tripled)(x, j + torch.tensor([0, 0, 1, 1])).square().sum()
    )(x),
    "of a vmap": lambda x, j: torch.func.vmap(lambda k: x[0][k])(torch.stack([j, -j])),
    "of each": lambda x, j: torch.func.vmap(lambda v, k: v[k])(x, j + torch.tensor([0, 0, 1, 1])),
    "write": lambda x, j: written(x, j, value=x[0]),
    "write a number": lambda x, j: written(x, slice(None), j, value=7.0),
    "write both": lambda x, j: written(x, j, j, value=torch.tensor(3.0)),
    "write a part": lambda x, j: written(x, ..., j, [0, 2], value=x[1, 1:3]),
    "write what is read": lambda x, j: written(x, j, value=x[j] + 1),
    "write beside a mask": lambda x, j: written(x, MASK, j, value=7.0),
    "write around a mask": lambda x, j: written(x[None], 0, MASK.tolist(), ..., j, value=7.0),
    "read again": lambda x, j: x[j].clone() + written(x, j, value=2.0)[j],
}


@pytest.mark.parametrize("dims", [(), ("a",), (None, "a")], ids=str)
@pytest.mark.parametrize("place", [1, -2])
@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_that_of_torch(name, place, dims):
    f, j = PARTS[name], torch.tensor(place)
    found = spmd(f)(distribute(X, MESH.layout(*dims), COMM), distribute(j, MESH.layout(), COMM))
    assert torch.equal(found.full(), f(X, j))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8], ids=str)
@pytest.mark.parametrize("name", ["both", "select", "narrow", "write", "write both"])
def test_a_place_may_be_any_signed_integer(name, dtype):
    f, j = PARTS[name], torch.tensor(1, dtype=dtype)
    found = spmd(f)(distribute(X, MESH.layout("a"), COMM), distribute(j, MESH.layout(), COMM))
    assert torch.equal(found.full(), f(X, j))


def test_the_entries_of_a_scan_may_be_taken_by_its_steps():
    def f(x):
        return fd.scan(lambda c, i: (c + x[i], c[i]), torch.zeros(6), torch.arange(4))

    for dims in ((), ("a",), (None, "a")):
        total, entries = spmd(f)(distribute(X, MESH.layout(*dims), COMM))
        assert torch.equal(total.full(), X.sum(0))
        assert torch.equal(entries.full(), torch.cat([torch.zeros(1, 6), X.cumsum(0)])[:4].diag())


def added_in_place(x, j):
    x = x.clone()
    x[j] += 1
    return x


def written_through_a_view(x, j):
    x = x.clone()
    x[j].view(2, 3)[0, 0] = 1
    return x


def written_as_out(x, j):
    x = x.clone()
    torch.add(x[0], 1, out=x[j])
    return x


def read_after_a_write(x, j):
    x = x.clone()
    row = x[j][1:]
    x.add_(1)
    return row * 2


@pytest.mark.parametrize("f", [added_in_place, written_through_a_view, written_as_out])
def test_a_write_to_a_part_is_refused(f):
    with pytest.raises(TraceError, match="writes to a part of a tensor at a place that a tensor"):
        spmd(f)(X_CUT, J)


def test_a_part_is_not_read_after_its_whole_was_written_to():
    with pytest.raises(TraceError, match="is read after the tensor was written to"):
        spmd(read_after_a_write)(X_CUT, J)


def test_a_place_out_of_range_is_told_as_it_was_written():
    with pytest.raises(IndexRangeError, match=r"-4 to 3.*\n(.*\n)*.*one of them: -5"):
        spmd(lambda x, j: x[j - 6])(X_CUT, J)
    with pytest.raises(IndexRangeError, match="index of index_select, 0 to 5"):
        spmd(lambda x, j: x.narrow(1, j, 6))(X_CUT, J)


@pytest.mark.parametrize("f", [lambda x: x[99], lambda x: x.select(0, 9), lambda x: x.sum(7)])
def test_a_number_out_of_range_is_an_index_error_as_in_torch(f):
    for g in (f, spmd(f)):
        with pytest.raises(IndexError, match="fails on these types") as error:
            g(X_CUT)
        assert isinstance(error.value, IndexRangeError)


def test_a_slice_between_places_is_told_how_to_write_it():
    with pytest.raises(DataDependentError) as error:
        spmd(lambda x, j: x[j * 2 : (j + 1) * 2])(X_CUT, J)
    assert "x.index_select(0, i * 2 + torch.arange(2))" in str(error.value)


X_CUT = distribute(X, MESH.layout("a"), COMM)
J = distribute(torch.tensor(1), MESH.layout(), COMM)
