"""Derivatives on real ranks: the code that a single process would run gives its gradients.

Each body runs on every rank, also on those that are in none of the meshes, and on simulated ranks.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.planner import plan
from fdtensor.runtime.interpreter import run
from fdtensor.tensors.connect import connect, redistribute
from fdtensor.tensors.distribution import distribute, from_local
from fdtensor.testing.pool import WorkerError
from fdtensor.testing.strategies import layouts, meshes, redistributions
from fdtensor.testing.values import block, full_tensor

pytestmark = pytest.mark.mesh

LINEAR = ("sum", "avg")
linear = redistributions(4, dtype=torch.float64, partial=LINEAR) | redistributions(
    4, True, dtype=torch.float64, partial=LINEAR
)
few = settings(max_examples=settings.default.max_examples // 5)


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
    return connect(Mesh(world=4))


def carried(x, types, comm):
    """`x`, laid out in one way after the other."""
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


# --- what ranks outside of a mesh do ---------------------------------------------------------


def moved_by_hand(src, dst, shape, requires_grad):
    """The gradients that `run` gives where ranks outside give an empty tensor, and the result."""
    comm, rank = comm_here(), dist.get_rank()
    inside = rank in src.mesh.ranks
    local = block(full_tensor(src, 0), src, rank) if inside else torch.zeros(shape).double()
    local.requires_grad_(requires_grad[rank])
    there = run(plan(src, dst), local, comm)
    (grad,) = torch.autograd.grad((there**2).sum(), local, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), local)
    return there.detach(), grad.detach(), second


def two_pairs(src, dst):
    """Types of one tensor on ranks 0 and 1 and on ranks 2 and 3."""
    first, second = Mesh.from_ranks([0, 1], "x"), Mesh.from_ranks([2, 3], "y")
    shape = (5, 3)
    return (
        TensorType(shape, torch.float64, first.layout(*src)),
        TensorType(shape, torch.float64, second.layout(*dst)),
    )


@pytest.mark.parametrize("shape", [(0, 0), (0,), (2, 2), ()], ids=str)
def test_a_rank_outside_takes_part_with_any_tensor_that_requires_grad(pool4, shape):
    src, dst = two_pairs(("x",), (None, "y"))
    found = pool4.run(moved_by_hand, src, dst, shape, [True] * 4)
    for rank, (there, grad, second) in enumerate(found):
        if rank in src.mesh.ranks:
            assert there.shape == (0, 0)
            assert torch.equal(grad, 2 * block_of(src, rank))
            assert torch.equal(second, torch.full_like(grad, 2))
        else:
            assert torch.equal(there, block_of(dst, rank))
            assert torch.equal(grad, torch.zeros(shape).double())
            assert torch.equal(second, torch.zeros(shape).double())


def block_of(type, rank):
    return block(full_tensor(type, 0), type, rank)


@pytest.mark.parametrize("requires_grad", [[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 1]], ids=str)
def test_ranks_that_differ_in_what_they_track_fail_together(pool4, requires_grad):
    src, dst = two_pairs(("x",), (None, "y"))
    with pytest.raises(WorkerError) as raised:
        pool4.run(moved_by_hand, src, dst, (0, 0), [bool(r) for r in requires_grad])
    assert sorted(raised.value.failures) == [0, 1, 2, 3]
    for rank, text in raised.value.failures.items():
        about = "this plan with its gradient" if requires_grad[rank] else "this plan"
        assert "CommError: the ranks do not agree on" in text
        assert f"`{about}` test_autograd.py" in text


def refusing(op):
    comm = comm_here()
    x = distribute(torch.ones(4, requires_grad=True), comm.mesh.layout("world"), comm)
    full = x.redistribute(comm.mesh.layout(partial={"world": op})).full()
    assert full.tolist() == [1] * 4
    full.sum().backward()


@pytest.mark.parametrize("op", ["max", "product"])
def test_what_is_not_linear_refuses_on_every_rank(pool4, op):
    with pytest.raises(WorkerError) as raised:
        pool4.run(refusing, op)
    assert sorted(raised.value.failures) == [0, 1, 2, 3]
    for text in raised.value.failures.values():
        assert f"PlanError: a plan with {op} pending is not linear" in text


# --- the ways in -----------------------------------------------------------------------------


def from_one_rank(type, src_rank, others, requires_grad):
    """The gradient at `src_rank`, and whether the blocks of this rank are tracked."""
    comm, rank = comm_here(), dist.get_rank()
    mine = ints(type.shape).requires_grad_(requires_grad) if rank == src_rank or others else None
    x = distribute(mine, type.layout, comm, src_rank=src_rank)
    if x.local.requires_grad:
        (x.full() ** 3).sum().backward()
    return x.local.requires_grad, None if mine is None else mine.grad


@few
@given(linear, st.integers(0, 3), st.booleans(), st.booleans())
def test_a_tensor_from_one_rank_gets_its_gradient_there(
    pool4, redistribution, src_rank, others, requires_grad
):
    type = redistribution[0]
    found = pool4.run(from_one_rank, type, src_rank, others, requires_grad)
    for rank, (tracked, grad) in enumerate(found):
        assert tracked == requires_grad
        if not requires_grad or rank != src_rank:
            assert grad is None or not grad.any()
        else:
            assert torch.equal(grad, 3 * ints(type.shape) ** 2)


def grad_from_one_rank(type, src_rank):
    comm = comm_here()
    x = (1 if dist.get_rank() == src_rank else 7) * ints(type.shape)
    return torch.func.grad(
        lambda x: (distribute(x, type.layout, comm, src_rank=src_rank).full() ** 3).sum()
    )(x)


@few
@given(linear, st.integers(0, 3))
def test_a_transform_sees_the_tensor_of_one_rank(pool4, redistribution, src_rank):
    type = redistribution[0]
    for rank, grad in enumerate(pool4.run(grad_from_one_rank, type, src_rank)):
        assert torch.equal(grad, (3 * (rank == src_rank)) * ints(type.shape) ** 2)


def from_terms(type):
    """The gradient of this rank's term, or of the empty tensor of a rank outside."""
    comm, rank = comm_here(), dist.get_rank()
    inside = rank in type.mesh.ranks
    local = torch.ones(type.local_shape(rank) if inside else (0,)).double().requires_grad_()
    from_local(local, type, comm).full().sum().backward()  # of which every rank has the value
    return local.grad


@pytest.mark.parametrize(("op", "part"), [("sum", 1), ("avg", 2)])
def test_a_term_of_an_average_gets_its_part_of_the_cotangent(pool4, op, part):
    mesh = Mesh.from_ranks([2, 0], "x")
    type = TensorType((3,), torch.float64, mesh.layout(partial={"x": op}))
    found = pool4.run(from_terms, type)
    assert [found[rank].tolist() for rank in (0, 2)] == [[1 / part] * 3] * 2
    assert [tuple(found[rank].shape) for rank in (1, 3)] == [(0,), (0,)]


def tree_derivatives(pairs):
    """The gradients of tensors that move together, and what the transforms make of them."""
    comm = comm_here()
    x = tuple(ints(src.shape, i) for i, (src, _) in enumerate(pairs))

    def through(*tensors):
        tree = [distribute(t, src.layout, comm) for t, (src, _) in zip(tensors, pairs, strict=True)]
        return tuple(y.full() for y in redistribute(tree, [dst for _, dst in pairs]))

    def loss(*tensors):
        return sum((full**3).sum() for full in through(*tensors))

    leaves = [tensor.clone().requires_grad_() for tensor in x]
    grads = torch.autograd.grad(loss(*leaves), leaves)
    again = torch.func.grad(loss, tuple(range(len(x))))(*x)
    _, tangents = torch.func.jvp(through, x, tuple(2 * tensor for tensor in x))
    batch = torch.func.vmap(through)(*[torch.stack([tensor, 3 * tensor]) for tensor in x])
    return grads, again, tangents, batch


@few
@given(st.lists(linear, min_size=1, max_size=4))
def test_tensors_that_move_together_have_their_own_derivatives(pool4, pairs):
    for rank, found in enumerate(pool4.run(tree_derivatives, pairs)):
        for i, (grad, again, tangent, batch) in enumerate(zip(*found, strict=True)):
            x, (src, dst) = ints(pairs[i][0].shape, i), pairs[i]
            expected = 3 * x**2 if rank in src.mesh.ranks else torch.zeros_like(x)
            assert torch.equal(grad, expected)
            assert torch.equal(again, expected)
            if rank in dst.mesh.ranks:
                assert torch.equal(tangent, 2 * x)
                assert torch.equal(batch, torch.stack([x, 3 * x]))
