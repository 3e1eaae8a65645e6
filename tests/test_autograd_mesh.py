"""Derivatives on real ranks: the code that a single process would run gives its gradients.

Each body runs on every rank, also on those that are in none of the meshes, and on simulated ranks.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor.testing.pool import WorkerError
from fdtensor.testing.strategies import layouts, meshes, redistributions

pytestmark = pytest.mark.mesh

LINEAR = ("sum", "avg")
linear = redistributions(4, dtype=torch.float64, partial=LINEAR) | redistributions(
    4, True, dtype=torch.float64, partial=LINEAR
)
few = settings(max_examples=max(5, settings.default.max_examples // 3))


@st.composite
def journeys(draw):
    """Types of one tensor, on meshes of four ranks: where it starts, and where it goes then."""
    src, dst = draw(linear)
    third = draw(layouts(draw(meshes(world=4)), src.shape, partial=LINEAR))
    return src, dst, src.with_layout(third)


def ints(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, tuple(shape), generator=generator).to(torch.float64)


def comm_here():
    """The four simulated ranks, or this rank of four."""
    from fdtensor.api import connect
    from fdtensor.mesh import Mesh

    return connect(Mesh(world=4))


def carried(x, types, comm):
    """`x`, laid out in one way after the other."""
    from fdtensor.distribution import distribute

    y = distribute(x, types[0].layout, comm)
    for type in types[1:]:
        y = y.redistribute(type)
    return y.full()


def cubes(x, types, comm):
    return (carried(x, types, comm) ** 3).sum()


def first_and_second(types):
    """The gradient of the cubes by autograd, and the gradient of its sum."""
    comm, x = comm_here(), ints(types[0].shape).requires_grad_()
    (grad,) = torch.autograd.grad(cubes(x, types, comm), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    return grad.detach(), second


def transformed(types):
    """The gradient, a product with the Jacobian on either side and what vmap gives."""
    comm, x = comm_here(), ints(types[0].shape)
    full, vjp = torch.func.vjp(lambda x: carried(x, types, comm), x)
    _, tangent = torch.func.jvp(lambda x: carried(x, types, comm), (x,), (2 * x,))
    batch = torch.stack([x, 2 * x])
    return (
        torch.func.grad(cubes)(x, types, comm),
        vjp(3 * full)[0],
        tangent,
        torch.func.vmap(lambda x: carried(x, types, comm))(batch),
        torch.func.vmap(torch.func.grad(lambda x: cubes(x, types, comm)))(batch),
    )


def hessian(types):
    comm, x = comm_here(), ints(types[0].shape)
    return (torch.func.hessian(lambda x: cubes(x, types, comm))(x),)


@few
@given(journeys())
def test_gradients_are_those_of_a_single_process(pool4, types):
    x = ints(types[0].shape)
    expected = (3 * x**2, 6 * x)
    assert all(map(torch.equal, first_and_second(types), expected))
    for rank, found in enumerate(pool4.run(first_and_second, types)):
        inside = rank in types[0].mesh.ranks
        for value, single in zip(found, expected, strict=True):
            assert torch.equal(value, single if inside else torch.zeros_like(single))


@few
@given(journeys())
def test_transforms_are_those_of_a_single_process(pool4, types):
    x = ints(types[0].shape)
    twice = torch.stack([x, 2 * x])
    at_source = (3 * x**2, 3 * x)
    at_target = (2 * x, twice)
    expected = (*at_source, *at_target, 3 * twice**2)
    assert all(map(torch.equal, transformed(types), expected))
    for rank, (grad, vjp, tangent, batch, grads) in enumerate(pool4.run(transformed, types)):
        inside = rank in types[0].mesh.ranks
        for value, single in zip((grad, vjp, grads), (*at_source, 3 * twice**2), strict=True):
            assert torch.equal(value, single if inside else torch.zeros_like(single))
        if rank in types[-1].mesh.ranks:
            assert all(map(torch.equal, (tangent, batch), at_target))


@few
@given(journeys().filter(lambda types: types[0].numel <= 24))
def test_the_hessian_is_that_of_a_single_process(pool4, types):
    x = ints(types[0].shape)
    expected = torch.diag(6 * x.reshape(-1)).reshape(x.shape * 2)
    assert torch.equal(hessian(types)[0], expected)
    for rank, (found,) in enumerate(pool4.run(hessian, types)):
        inside = rank in types[0].mesh.ranks
        assert torch.equal(found, expected if inside else torch.zeros_like(expected))
