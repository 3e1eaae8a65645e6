"""Tests of runtime/autograd.py, on simulated ranks: derivatives are those of the full tensor.

Whatever the layouts, a redistribution is the identity on the full tensor. Values are integers in
float64, so that derivatives are equal to the bit.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from fdtensor.layouts.errors import PlanError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.fused import fuse
from fdtensor.plans.planner import plan
from fdtensor.runtime.interpreter import digest_of, run, run_fused
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.connect import redistribute
from fdtensor.tensors.distribution import distribute, from_local
from fdtensor.tensors.dtensor import DTensor
from fdtensor.testing.strategies import layouts, meshes, redistributions
from fdtensor.testing.values import block, full_tensor, gather_full, scatter

LINEAR = ("sum", "avg")
R, S0, S1 = Replicate(), Shard(0), Shard(1)

few = settings(max_examples=settings.default.max_examples * 2 // 5)

linear = redistributions(dtype=torch.float64, partial=LINEAR) | redistributions(
    dtype=torch.float64, partial=LINEAR, cross_mesh=True
)


def comm_of(*types, **kwargs):
    """A Comm that has the ranks of all these types."""
    return SimulatedComm(Mesh(world=1 + max(r for t in types for r in t.mesh.ranks)), **kwargs)


def leaves_of(full, type):
    return tuple(t.requires_grad_() for t in scatter(full, type, seed=1))


def blocks(full, type):
    return tuple(block(full, type, rank) for rank in type.mesh.ranks)


def ints(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, tuple(shape), generator=generator).to(torch.float64)


# --- plans -----------------------------------------------------------------------------------


@given(linear)
def test_the_gradient_of_a_plan_is_that_of_the_full_tensor(redistribution):
    src, dst = redistribution
    x = leaves_of(full_tensor(src, 0), src)
    there = run(plan(src, dst), x, comm_of(src, dst))
    y = ints(src.shape, 2)
    grads = torch.autograd.grad(there, x, blocks(y, dst.cotangent()))
    assert torch.equal(gather_full(grads, src.cotangent()), y)


@given(linear)
def test_the_backward_runs_the_transposed_plan(redistribution):
    src, dst = redistribution
    forth, digests = plan(src, dst), []
    comm = comm_of(src, dst, check="always")
    comm.agree = lambda about, digest, meshes, mistake: digests.append(digest)
    x, y = leaves_of(full_tensor(src, 0), src), blocks(ints(src.shape, 2), dst.cotangent())
    there = run(forth, x, comm)
    torch.autograd.backward(there, y)
    back = forth.transpose()
    assert digests == [digest_of(f"{forth.digest} with its gradient"), back.digest]
    assert (back.src, back.dst) == (dst.cotangent(), src.cotangent())
    grads = run(back, y, comm)
    assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(x, grads, strict=True))


@given(linear)
def test_a_plan_is_twice_differentiable(redistribution):
    """The derivative of `<A x, y>` by `y`, and that of its gradient `A' y`, is a plan again."""
    src, dst = redistribution
    comm, full = comm_of(src, dst), full_tensor(src, 0)
    x = leaves_of(full, src)
    y = leaves_of(ints(src.shape, 2), dst.cotangent())
    there = run(plan(src, dst), x, comm)
    grads = torch.autograd.grad(there, x, y, create_graph=True)
    z = ints(src.shape, 3)
    again = torch.autograd.grad(grads, y, blocks(z, src.cotangent()))
    assert torch.equal(gather_full(again, dst.cotangent()), z)


@given(linear, st.sampled_from((0, 1, -1)))
def test_vmap_runs_one_plan_for_the_whole_batch(redistribution, dim):
    src, dst = redistribution
    comm, found = comm_of(src, dst), plan(src, dst)
    batch = [scatter(full_tensor(src, seed), src, seed) for seed in range(3)]
    one_by_one = [run(found, value, comm) for value in batch]
    dim = dim if src.shape else 0
    stacked = tuple(torch.stack(leaves, dim) for leaves in zip(*batch, strict=True))
    comm.calls.clear()
    there = torch.func.vmap(lambda *leaves: run(found, leaves, comm), dim, dim)(*stacked)
    assert sum(comm.calls.values()) <= 2
    for i, value in enumerate(one_by_one):
        full = gather_full(value, dst)
        assert torch.equal(gather_full([leaf.select(dim, i) for leaf in there], dst), full)


@given(linear)
def test_forward_mode_carries_tangents_through_the_plan(redistribution):
    src, dst = redistribution
    comm, found = comm_of(src, dst), plan(src, dst)
    x, t = (scatter(full_tensor(src, seed), src, seed) for seed in (0, 1))
    there = run(found, x, comm)
    func = torch.func.jvp(lambda *leaves: run(found, leaves, comm), x, t)
    with forward_ad.dual_level():
        duals = run(found, tuple(map(forward_ad.make_dual, x, t)), comm)
        pairs = [forward_ad.unpack_dual(dual) for dual in duals]
    for primals, tangents in (func, zip(*pairs, strict=True)):
        assert all(map(torch.equal, primals, there))
        assert torch.equal(gather_full(tangents, dst), full_tensor(src, 1))


# --- distributed tensors ---------------------------------------------------------------------


@st.composite
def chains(draw):
    """A mesh's Comm, and a function of a plain tensor that lays it out in several ways."""
    src, dst = draw(linear)
    also = draw(layouts(draw(meshes(world=src.mesh.ranks)), src.shape, partial=LINEAR))
    comm = comm_of(src, dst)

    def through(tensor):
        x = distribute(tensor, src.layout, comm)
        y = x.redistribute(dst)
        return y.redistribute(also).full()

    return src.shape, through


def cubed(through, weight):
    """A loss of one process, but for `through`."""
    return lambda x: (weight * through(x) ** 3).sum()


@given(chains())
def test_a_loss_of_full_has_the_gradient_of_a_single_process(chain):
    shape, through = chain
    x, w = ints(shape, 0).requires_grad_(), ints(shape, 1)
    loss = cubed(through, w)(x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(grad, 3 * w * x**2)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(second, 6 * w * x)


@few
@given(chains())
def test_the_transforms_of_torch_func_see_a_single_process(chain):
    shape, through = chain
    x, w, t = ints(shape, 0), ints(shape, 1), ints(shape, 2)
    f = cubed(through, w)
    assert torch.equal(torch.func.grad(f)(x), 3 * w * x**2)
    out, vjp = torch.func.vjp(through, x)
    assert torch.equal(out, x)
    assert torch.equal(vjp(t)[0], t)
    value, tangent = torch.func.jvp(f, (x,), (t,))
    assert torch.equal(value, (w * x**3).sum())
    assert torch.equal(tangent, (3 * w * x**2 * t).sum())
    batch = torch.stack([x, t, w])
    assert torch.equal(torch.func.vmap(through)(batch), batch)
    assert torch.equal(torch.func.vmap(torch.func.grad(f))(batch), 3 * w * batch**2)


@few
@given(chains())
def test_the_hessian_is_that_of_a_single_process(chain):
    shape, through = chain
    if torch.Size(shape).numel() > 24:
        shape, through = (), lambda x: x  # too many columns
    x, w = ints(shape, 0), ints(shape, 1)
    f = cubed(through, w)
    expected = torch.diag((6 * w * x).reshape(-1)).reshape((*shape, *shape))
    assert torch.equal(torch.func.hessian(f)(x), expected)
    assert torch.equal(torch.func.jacrev(torch.func.jacrev(f))(x), expected)


@given(linear)
def test_a_replica_that_the_loss_does_not_use_changes_nothing(redistribution):
    src, dst = redistribution
    dst = dst.cotangent()
    comm = comm_of(src, dst)
    x = leaves_of(full_tensor(src, 0), src)
    there = from_local(x, src, comm).redistribute(dst).local
    seen, loss = set(), torch.zeros((), dtype=torch.float64)
    for rank, leaf in zip(dst.mesh.ranks, there, strict=True):
        index = tuple(map(tuple, dst.index(rank)))
        loss = loss if index in seen else loss + (leaf**2).sum() / 2
        seen.add(index)
    loss.backward()
    counts = 1
    for axis, op in src.layout.partial.items():
        counts *= src.mesh.axis_size(axis) if op == "avg" else 1
    grads = [leaf.grad * counts for leaf in x]
    torch.testing.assert_close(gather_full(grads, src.cotangent()), full_tensor(src, 0))


@given(linear)
def test_one_block_alone_can_be_differentiated(redistribution):
    """The others get zeros, and so do the elements that the block does not have."""
    src, dst = redistribution
    dst = dst.cotangent()
    rank = dst.mesh.ranks[-1]
    x = leaves_of(full_tensor(src, 0), src)
    there = run(plan(src, dst), x, comm_of(src, dst))
    there[-1].sum().backward()
    expected = torch.zeros(src.shape, dtype=torch.float64)
    for index in itertools.product(*dst.index(rank)):
        expected[index] = 1
    assert torch.equal(gather_full([leaf.grad for leaf in x], src.cotangent()), expected)


# --- terms -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "part"), [("sum", 1), ("avg", 4)])
def test_a_term_of_an_average_gets_its_part_of_the_cotangent(op, part):
    layout = Layout(Mesh(dp=2, tp=2, pp=2), [Partial(op), S0, Partial(op)])
    type = TensorType((4,), torch.float64, layout)
    x = leaves_of(full_tensor(type, 0), type)
    y = ints((4,), 1)
    (from_local(x, type, comm_of(type)).full() * y).sum().backward()
    for rank, leaf in zip(type.mesh.ranks, x, strict=True):
        assert torch.equal(leaf.grad, block(y, type.cotangent(), rank) / part)


@given(redistributions(dtype=torch.float64, partial=LINEAR))
def test_terms_that_go_out_and_in_keep_their_derivative(redistribution):
    """Twice the terms of an average are twice the average: `to_local` undoes `from_local`."""
    src, dst = redistribution
    comm, t = comm_of(src, dst), ints(src.shape, 0).requires_grad_()
    y = distribute(t, src.layout, comm)
    for _ in range(2):
        y = from_local(tuple(2 * leaf for leaf in y.to_local()), src, comm)
    full = y.redistribute(dst).full()
    assert torch.equal(full, 4 * t)
    (grad,) = torch.autograd.grad(full.sum(), t)
    torch.testing.assert_close(grad, torch.full_like(t, 4.0))


# --- what has no derivative ------------------------------------------------------------------


@given(redistributions(dtype=torch.float64))
def test_a_plan_that_is_not_linear_refuses_in_the_backward(redistribution):
    src, dst = redistribution
    comm = comm_of(src, dst)
    x = leaves_of(full_tensor(src, 0), src)
    there = run(plan(src, dst), x, comm)
    assert torch.equal(gather_full([leaf.detach() for leaf in there], dst), full_tensor(src, 0))
    ops = {*src.layout.partial.values(), *dst.layout.partial.values()}
    if ops <= set(LINEAR):
        return
    with pytest.raises(PlanError, match="not linear"):
        torch.autograd.backward(there, there)
    with pytest.raises(PlanError, match="not linear"):
        torch.func.jvp(lambda *leaves: run(plan(src, dst), leaves, comm), x, x)
    assert all(leaf.grad is None for leaf in x)


def test_integers_are_never_tracked():
    comm = SimulatedComm(Mesh(dp=2))
    x = distribute(torch.arange(4), Layout(comm.mesh, [S0]), comm)
    there = x.redistribute(Layout(comm.mesh, [R]))
    assert not any(leaf.requires_grad for leaf in (*x.local, *there.local))

    def f(weight):
        places = distribute(torch.arange(4), Layout(comm.mesh, [S0]), comm).full()
        return (weight * places).sum()

    assert torch.func.grad(f)(torch.ones(4)).tolist() == [0, 1, 2, 3]


def test_results_require_grad_where_something_does():
    mesh = Mesh(dp=2)
    comm, out = SimulatedComm(mesh), Layout(mesh, [R])
    type = TensorType((4,), torch.float64, Layout(mesh, [S0]))
    a, b = scatter(full_tensor(type, 0), type, 0)
    assert not any(leaf.requires_grad for leaf in run(plan(type, out), (a, b), comm))
    b.requires_grad_()
    assert all(leaf.requires_grad for leaf in run(plan(type, out), (a, b), comm))
    with torch.no_grad():
        assert not any(leaf.requires_grad for leaf in run(plan(type, out), (a, b), comm))
    x = from_local((a, b), type, comm)
    assert not x.detach().redistribute(out).full().requires_grad
    assert x.redistribute(out).full().requires_grad
    assert all(leaf.is_leaf for leaf in x.detach().requires_grad_().local)


def test_without_gradients_nothing_is_recorded(monkeypatch):
    mesh = Mesh(dp=2)
    comm = SimulatedComm(mesh)
    monkeypatch.setattr("fdtensor.runtime.interpreter.differentiable", None)
    x = distribute(torch.ones(4), Layout(mesh, [S0]), comm)
    assert x.full().tolist() == [1] * 4
    leaf = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        assert distribute(leaf, Layout(mesh, [S0]), comm).full().tolist() == [1] * 4
    with pytest.raises(TypeError):
        distribute(leaf, Layout(mesh, [S0]), comm)


# --- many at once ----------------------------------------------------------------------------


@given(st.lists(linear, min_size=1, max_size=4))
def test_tensors_that_move_together_have_their_own_gradients(pairs):
    comm = comm_of(*[type for pair in pairs for type in pair])
    fused = fuse([plan(*pair) for pair in pairs])
    x = [leaves_of(full_tensor(src, i), src) for i, (src, _) in enumerate(pairs)]
    y = [ints(src.shape, i) for i, (src, _) in enumerate(pairs)]
    out = run_fused(fused, x, comm)
    cotangents = [
        b for full, (_, d) in zip(y, pairs, strict=True) for b in blocks(full, d.cotangent())
    ]
    torch.autograd.backward([leaf for value in out for leaf in value], cotangents)
    for leaves, full, (src, _) in zip(x, y, pairs, strict=True):
        assert torch.equal(gather_full([leaf.grad for leaf in leaves], src.cotangent()), full)


@few
@given(linear, linear)
def test_the_transforms_see_trees_as_a_single_process(first, second):
    pairs = (first, second)
    comm = comm_of(*first, *second)

    def through(*tensors):
        tree = [distribute(t, src.layout, comm) for t, (src, _) in zip(tensors, pairs, strict=True)]
        out = redistribute(tree, [dst for _, dst in pairs])
        return tuple(x.full() for x in out)

    def loss(*tensors):
        a, b = through(*tensors)
        return (a**3).sum() * (b**2).sum()

    def plain(a, b):
        return (a**3).sum() * (b**2).sum()

    x = tuple(ints(src.shape, i) for i, (src, _) in enumerate(pairs))
    t = tuple(ints(src.shape, 2 + i) for i, (src, _) in enumerate(pairs))
    for ours, theirs in [
        (torch.func.grad(loss, (0, 1))(*x), torch.func.grad(plain, (0, 1))(*x)),
        (torch.func.jvp(loss, x, t), torch.func.jvp(plain, x, t)),
        (torch.func.vmap(loss)(*(torch.stack(p) for p in zip(x, t))), [plain(*x), plain(*t)]),
    ]:
        assert all(map(torch.equal, ours, theirs))


def test_of_a_tree_only_what_the_loss_uses_needs_a_gradient():
    mesh = Mesh(dp=2)
    comm = SimulatedComm(mesh)
    a, b = torch.ones(4, requires_grad=True), torch.ones(3, requires_grad=True)
    tree = {k: distribute(v, Layout(mesh, [S0]), comm) for k, v in {"a": a, "b": b}.items()}
    out = redistribute(tree, Layout(mesh, [R]))
    out["a"].full().sum().backward()
    assert a.grad.tolist() == [1] * 4
    assert b.grad is None or b.grad.tolist() == [0] * 3


def test_a_dtensor_is_made_of_leaves_that_get_their_gradients():
    mesh = Mesh(dp=2, tp=2)
    comm = SimulatedComm(mesh)
    type = TensorType((4, 2), torch.float64, Layout(mesh, [S0, R]))
    x = distribute(full_tensor(type, 0), type.layout, comm).requires_grad_()
    assert isinstance(x, DTensor)
    (x.redistribute(Layout(mesh, [R, S1])).full() ** 2).sum().backward()
    assert torch.equal(gather_full([leaf.grad for leaf in x.local], type), 2 * full_tensor(type, 0))
