"""Tests of ops/decompositions/products.py: derivatives of products at indices, zeros among them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap

from fdtensor import Mesh, OperandError, Shard, SimulatedComm, distribute, spmd
from fdtensor.testing.strategies import layouts

few = settings(max_examples=max(4, settings.default.max_examples // 6))
MESHES = (Mesh(a=2), Mesh(a=3))


def scattered(x, i, src, dim, include_self):
    return x.scatter_reduce(dim, i, src, "prod", include_self=include_self)


def scattered_in_place(x, i, src, dim, include_self):
    return (x * 1).scatter_reduce_(dim, i, src, "prod", include_self=include_self)


def indexed(x, i, src, dim, include_self):
    i = i.select(1 - dim, 0)
    return x.index_reduce(dim, i, src, "prod", include_self=include_self)


def indexed_in_place(x, i, src, dim, include_self):
    i = i.select(1 - dim, 0)
    return (x * 1).index_reduce_(dim, i, src, "prod", include_self=include_self)


WAYS = (scattered, scattered_in_place, indexed, indexed_in_place)


@st.composite
def operands(draw):
    """A matrix, indices of a dim of it and as many factors: small integers, many of them 0."""
    dim, along = draw(st.integers(0, 1)), draw(st.integers(1, 6))
    shape, of = [3, 4], [3, 4]
    of[dim] = along
    numbers = st.sampled_from((0.0, 0.0, 1.0, -2.0, 3.0, 4.0))

    def drawn(of, values):
        count = of[0] * of[1]
        return torch.tensor(draw(st.lists(values, min_size=count, max_size=count))).reshape(of)

    x, src = drawn(shape, numbers).double(), drawn(of, numbers).double()
    return x, drawn(of, st.integers(0, shape[dim] - 1)), src, dim


def gradients(f, dim, include_self):
    def loss(x, src, i, weights):
        return (f(x, i, src, dim, include_self) * weights).sum()

    return grad(loss, (0, 1))


def weights():
    return torch.arange(1.0, 13, dtype=torch.float64).reshape(3, 4)


@pytest.mark.parametrize("f", WAYS)
def test_gradients_of_products_are_those_of_torch_on_every_layout(f):
    @few
    @given(st.data(), operands(), st.booleans(), st.sampled_from(MESHES))
    def law(data, given, include_self, mesh):
        x, i, src, dim = given
        whole = x, src, i, weights()
        pulled = gradients(f, dim, include_self)
        comm = SimulatedComm(mesh)
        held = [
            distribute(t, data.draw(layouts(mesh, tuple(t.shape), partial=())), comm) for t in whole
        ]
        for got, due in zip(spmd(pulled)(*held), pulled(*whole), strict=True):
            assert torch.equal(got.full(), due)

    law()


MESH = Mesh(a=2)
COMM = SimulatedComm(MESH)
I = torch.tensor([[0, 1], [0, 1], [2, 1]])  # noqa: E741
SRC = torch.tensor([[0.0, 2], [3, 0], [5, 4]], dtype=torch.float64)
X = torch.tensor([[2.0, 3], [1, 1], [0, 7]], dtype=torch.float64)


def held(*tensors):
    return [distribute(t, MESH.layout("a"), COMM) for t in tensors]


def test_backward_of_a_product_outside_of_the_function():
    x, src = (t.requires_grad_() for t in held(X, SRC))
    spmd(lambda x, i, src: x.scatter_reduce(0, i, src, "prod").sum())(x, *held(I), src).backward()
    due = grad(lambda x, src: x.scatter_reduce(0, I, src, "prod").sum(), (0, 1))(X, SRC)
    for got, whole in zip((x, src), due, strict=True):
        assert isinstance(got.layout.placements[0], Shard)
        assert torch.equal(got.grad.full(), whole)


def twice(x, i, src):
    def loss(x, src):
        return (x.scatter_reduce(0, i, src, "prod") ** 2).sum()

    def first(x, src):
        return sum((g * g).sum() for g in grad(loss, (0, 1))(x, src))

    return grad(first, (0, 1))(x, src)


def test_second_derivatives_are_those_of_torch_and_refused_where_zeros_meet():
    for got, due in zip(spmd(twice)(*held(X, I, SRC)), twice(X, I, SRC), strict=True):
        torch.testing.assert_close(got.full(), due)
    src = (SRC * 0).requires_grad_()
    out = X.scatter_reduce(0, I, src, "prod").sum()
    (first,) = torch.autograd.grad(out, src, create_graph=True)
    with pytest.raises(RuntimeError, match="Double backward"):
        torch.autograd.grad(first.sum(), src)
    with pytest.raises(OperandError, match="second derivative"):
        spmd(twice)(*held(X, I, SRC * 0))


def test_gradients_of_products_under_vmap():
    def each(x, i, src):
        return vmap(lambda x, i, src: pulled(x, i, src))(x, i, src)

    def pulled(x, i, src):
        return grad(lambda src: x.scatter_reduce(0, i, src, "prod").sum())(src)

    batch = [torch.stack([t, t.flip(0)]) for t in (X, I, SRC)]
    due = torch.stack([pulled(*entry) for entry in zip(*batch, strict=True)])
    assert torch.equal(spmd(each)(*held(*batch)).full(), due)


def test_a_product_without_a_gradient_is_one_line():
    program = spmd(lambda x, i, src: x.scatter_reduce(0, i, src, "prod"), check_indices=False)
    assert str(program.trace(*held(X, I, SRC))).count("scatter_reduce") == 1
    assert "eq" not in str(program.trace(*held(X, I, SRC)))
