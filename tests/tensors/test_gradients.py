"""Tests of tensors/grad_norms.py and fdtensor/tensors/scaling.py."""

from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor.layouts.errors import (
    ArgumentError,
    CommError,
    FdtensorError,
    TraceError,
    ValueTreeError,
)
from fdtensor.layouts.mesh import Mesh
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.blockwise import NOT_BY_ELEMENT
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.grad_norms import (
    clip_grad_norm,
    clip_grad_norm_,
    found_inf,
    gradients,
    local_tensors,
    total_norm,
)
from fdtensor.tensors.scaling import GradScaler, LossScale
from fdtensor.tensors.spmd import spmd
from fdtensor.testing.strategies import meshes, types
from fdtensor.testing.values import block, full_tensor, gather_full, scatter

MESH = Mesh(dp=2, tp=3)
WORLD = Mesh(world=8)
few = settings(max_examples=settings.default.max_examples // 3)


@st.composite
def trees(draw, partial=("sum", "avg")):
    """Tensors of several layouts, on several meshes of one Comm, and the full tensors."""
    comm = SimulatedComm(WORLD)
    made, fulls = [], []
    for seed in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.complex64]))
        type = draw(types(draw(meshes(world=8)), dtype=dtype, partial=partial))
        full = full_tensor(type, seed)
        made.append(DTensor(scatter(full, type, seed), type, comm))
        fulls.append(full)
    return {"all": made, "none": None}, fulls


def plain_norm(fulls, p):
    whole = torch.cat([f.abs().double().flatten() for f in fulls])
    return torch.linalg.vector_norm(whole, p) if whole.numel() else torch.zeros(()).double()


@given(trees(), st.sampled_from([2.0, 1.0, 3.0, 0.5, inf]))
def test_the_norm_is_that_of_the_full_tensors(made, p):
    tree, fulls = made
    found = total_norm(tree, p)
    assert found.dtype in (torch.float32, torch.float64)
    torch.testing.assert_close(found.double(), plain_norm(fulls, p), rtol=1e-6, atol=0)


@given(trees(), st.sampled_from([2.0, inf]), st.sampled_from([0.5, 3.0, 1e9]))
def test_clipped_are_the_full_tensors_clipped(made, p, most):
    tree, fulls = made
    clipped, norm = clip_grad_norm(tree, most, p)
    factor = min(1.0, most / (plain_norm(fulls, p).item() + 1e-6))
    assert clipped["none"] is None
    torch.testing.assert_close(norm.double(), plain_norm(fulls, p), rtol=1e-6, atol=0)
    for x, given_, full in zip(clipped["all"], tree["all"], fulls, strict=True):
        assert x.type == given_.type.cotangent()
        torch.testing.assert_close(gather_full(x.local, x.type), full * factor, rtol=1e-5, atol=0)


@given(trees(), st.sampled_from([inf, -inf, nan, None]), st.data())
def test_one_number_that_is_not_finite_is_found(made, bad, data):
    tree, fulls = made
    spots = [x for x, full in zip(tree["all"], fulls) if full.numel()]
    if bad is None or not spots:
        assert not found_inf(tree)
        return
    x = data.draw(st.sampled_from(spots))
    held = [t for t in x.local if t.numel()]
    held[data.draw(st.integers(0, len(held) - 1))].view(-1)[-1] = bad
    assert found_inf(tree)
    assert found_inf(tree["all"])


@pytest.mark.parametrize("p", [2.0, inf])
def test_nan_is_the_largest_norm(p):
    comm = SimulatedComm(MESH)
    x = distribute(torch.tensor([1.0, nan, inf, 2.0]), MESH.layout("tp"), comm)
    assert total_norm([x], p).isnan()
    y = distribute(torch.tensor([1.0, 3.0, inf, 2.0]), MESH.layout("tp"), comm)
    assert total_norm([y], p) == inf
    assert not clip_grad_norm([y], 1.0)[0][0].full().isfinite().all()


def test_one_reduction_of_two_numbers():
    comm = SimulatedComm(WORLD)
    one, two = Mesh(x=2, y=2), Mesh.from_ranks([[7, 5], [3, 1]], ("a", "b"))
    tree = [
        distribute(torch.randn(5, 3), mesh.layout(*dims), comm)
        for mesh in (one, two)
        for dims in ((), (mesh.axes[0],), (None, mesh.axes))
    ]
    total_norm(tree)
    before = comm.calls.total()
    comm.received.clear()
    total_norm(tree)
    assert comm.calls.total() <= before + 2  # two exchanges, or one all_reduce
    assert max(comm.received.values()) <= 8 * 2 * 8


def test_mixed_precision_norms_do_not_overflow():
    comm = SimulatedComm(MESH)
    x = distribute(torch.full((6, 100), 3e4, dtype=torch.float16), MESH.layout("tp"), comm)
    y = distribute(torch.full((6,), 1e25), MESH.layout("dp"), comm)
    assert total_norm([x]).isfinite()
    assert total_norm([x, y], 1.0).isfinite()
    assert total_norm([y.detach()], inf) == 1e25


def test_what_can_be_gone_through_is_a_tree():
    comm = SimulatedComm(MESH)
    some = {k: distribute(torch.randn(3), MESH.layout("tp"), comm) for k in "ab"}
    for given_ in (some.values(), iter(some.values()), (x for x in some.values())):
        assert total_norm(given_) == total_norm(some)
    assert len(local_tensors(some.values())) == 12
    assert total_norm(some["a"]) < total_norm(some)


def test_an_empty_tree_has_norm_zero():
    assert total_norm({}) == 0
    assert clip_grad_norm({"a": None, "b": 3}, 1.0) == ({"a": None, "b": 3}, torch.zeros(()))
    assert not found_inf([])


# --- optimizers of torch ---------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
}


def loss_of(params, x):
    h = torch.tanh(x @ params[0]) * params[1]
    return (h @ params[2]).square().sum()


@st.composite
def parameters(draw):
    mesh = draw(meshes(max_axes=2))
    shapes = [(5, 7), (7,), (7, 3)]
    found = [draw(types(mesh, s, torch.float64, partial=False)) for s in shapes]
    return mesh, found


@few
@given(parameters(), st.sampled_from(sorted(OPTIMIZERS)))
def test_optimizers_of_torch_step_as_on_one_process(made, name):
    mesh, found = made
    comm = SimulatedComm(mesh)
    generator = torch.Generator().manual_seed(0)
    fulls = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in found]
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    params = [distribute(f, t.layout, comm).detach() for f, t in zip(fulls, found)]
    for p in params:
        p.requires_grad_()
    plain = [f.clone().requires_grad_() for f in fulls]
    ours, theirs = OPTIMIZERS[name](local_tensors(params)), OPTIMIZERS[name](plain)
    step = spmd(loss_of)
    here = distribute(x, mesh.layout(), comm)
    for _ in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        step(params, here).full().backward()
        loss_of(plain, x).backward()
        for p, full in zip(gradients(params), plain):
            assert p.type == p.type.cotangent()
            for rank, local in zip(mesh.order, p.local):
                torch.testing.assert_close(local, block(full.grad, p.type, rank))
        norm = clip_grad_norm_(params, 1.0)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain, 1.0))
        ours.step()
        theirs.step()
    for p, full in zip(params, plain):
        for rank, local in zip(mesh.order, p.local):
            torch.testing.assert_close(local.detach(), block(full.detach(), p.type, rank))
    for state in ours.state.values():
        shapes = {tuple(v.shape) for v in state.values() if isinstance(v, torch.Tensor)}
        assert len(shapes - {()}) <= 1


TORCH = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
}


@pytest.mark.parametrize("name", sorted(TORCH.keys() - {"Optimizer", "SparseAdam"}))
def test_torch_is_right_on_blocks_but_for_those_that_are_refused(name):
    """Of each optimizer: whether it steps on a half as on that half of the whole."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(6, 4, generator=generator) for _ in range(4))

    def stepped(start, grads):
        leaf = start.clone().requires_grad_()
        optimizer = TORCH[name]([leaf], lr=0.1)
        for leaf.grad in grads:
            optimizer.step((lambda: torch.ones(())) if name == "LBFGS" else None)
        return leaf.detach()

    half = stepped(start[:3], [g[:3].clone() for g in grads])
    whole = stepped(start, [g.clone() for g in grads])
    assert torch.allclose(half, whole[:3]) == (name not in NOT_BY_ELEMENT)


@pytest.mark.parametrize("name", NOT_BY_ELEMENT)
def test_blocks_are_refused_by_optimizers_that_are_wrong_on_them(name):
    comm = SimulatedComm(MESH)
    full, closure = torch.ones(6, 4), lambda: torch.ones(())
    whole = distribute(full, MESH.layout(), comm).requires_grad_()
    cut = distribute(full, MESH.layout("tp"), comm).requires_grad_()
    TORCH[name](local_tensors([whole])).step(closure)
    optimizer = TORCH[name](local_tensors({"whole": whole, "cut": cut}))
    assert refused(FdtensorError, lambda: optimizer.step(closure)) == BLOCKS.format(
        name=name,
        instead=f"fdtensor.optim.{name} steps on DTensors in any layout."
        if name != "LBFGS"
        else "Replicate these parameters first: x.redistribute(mesh.layout()).",
    )


def test_gradients_that_are_not_there_are_none():
    comm = SimulatedComm(MESH)
    x = distribute(torch.randn(4), MESH.layout("dp"), comm).requires_grad_()
    assert gradients({"x": x, "n": 3}) == {"x": None, "n": 3}


# --- scales ----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [2.0**16, 2.0**126])
def test_a_scale_grows_and_shrinks_as_that_of_torch(start):
    ours = LossScale(start, interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for bad in [False, True, False, False, False, True, True, False, False, False, False]:
        theirs.scale((weight * (inf if bad else 0.0)).sum()).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours = ours.after(bad)
        assert ours.value == theirs.get_scale()


def test_a_step_with_scaled_gradients_is_that_without():
    comm = SimulatedComm(MESH)
    w = distribute(torch.randn(6, 4), MESH.layout("tp", "dp"), comm)
    x = distribute(torch.randn(5, 6), MESH.layout("dp"), comm)
    f = spmd(torch.func.grad(lambda w, x, s: (x @ w).sin().sum() * s))
    scale = LossScale(1024.0)
    grads, skip = scale.unscaled({"w": f(w, x, scale.value)})
    assert not skip
    torch.testing.assert_close(grads["w"].full(), f(w, x, 1.0).full())
    grads, skip = scale.unscaled({"w": f(w, x, inf)})
    assert skip
    assert scale.after(skip) == LossScale(512.0)
    loss = distribute(torch.tensor(2.0), MESH.layout(), comm)
    assert scale.scaled(loss).full() == scale.scaled(torch.tensor(2.0)) == 2048


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_scaled_loss_is_that_of_torch(dtype, shape):
    loss, comm = torch.full(shape, 3.0, dtype=dtype), SimulatedComm(MESH)
    wanted = torch.amp.GradScaler("cpu", init_scale=2.0**16).scale(loss)
    whole = distribute(loss, MESH.layout(), comm)
    for scaled in (LossScale().scaled(loss), LossScale().scaled(whole).full()):
        assert scaled.dtype == wanted.dtype
        assert torch.equal(scaled, wanted)


def test_the_scaler_of_torch_leaves_a_step_out():
    comm = SimulatedComm(MESH)
    w = distribute(torch.randn(6, 4), MESH.layout("tp", "dp"), comm).requires_grad_()
    optimizer = torch.optim.SGD(local_tensors(w), lr=1.0)
    scaler = GradScaler(comm, init_scale=8.0)
    for bad in (True, False):
        before = w.full().detach()
        optimizer.zero_grad()
        loss = w.full().sum() * (inf if bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        expected = before if bad else before - 1
        torch.testing.assert_close(w.full().detach(), expected)
    assert scaler.get_scale() == 4.0


# --- mistakes --------------------------------------------------------------------------------


def refused(kind, f):
    with pytest.raises(kind) as error:
        f()
    return str(error.value)


def test_mistakes_are_told():
    comm = SimulatedComm(MESH)
    x = distribute(torch.tensor([1.0, inf]), MESH.layout("tp"), comm)
    y = distribute(torch.ones(2), WORLD.layout("world"), SimulatedComm(WORLD))
    z = distribute(torch.ones(2), Mesh(a=9).layout("a"), SimulatedComm(Mesh(a=9)))
    w = distribute(torch.ones(2), MESH.layout("tp"), comm).requires_grad_()
    w.local[0].grad = torch.ones(1)
    assert refused(ValueTreeError, lambda: total_norm({"a": torch.ones(3)})) == PLAIN
    assert refused(ValueTreeError, lambda: local_tensors([x, torch.ones(3)])) == PLAIN.replace(
        "'a'", "1"
    )
    assert refused(ValueTreeError, lambda: clip_grad_norm_(torch.nn.ReLU(), 1.0)) == NO_TREE
    assert refused(FdtensorError, lambda: total_norm([x], 0)) == KIND
    assert refused(FdtensorError, lambda: total_norm([x], error_if_nonfinite=True)) == NONFINITE
    assert total_norm([x, y]) == inf
    apart = distribute(torch.ones(2), Mesh.from_ranks([20], "b").layout(), SimulatedComm(
        Mesh.from_ranks([20], "b")))  # fmt: skip
    assert refused(CommError, lambda: found_inf([z, apart])) == COMMS
    assert refused(FdtensorError, lambda: gradients([w])) == SOME
    assert refused(FdtensorError, lambda: LossScale(0.0)) == SCALE
    for wrong in (
        {"value": inf},
        {"value": nan},
        {"interval": 1.5},
        {"streak": -1},
        {"growth": 0.5},
    ):
        assert "cannot be" in refused(FdtensorError, lambda wrong=wrong: LossScale(**wrong))
    assert refused(ArgumentError, lambda: GradScaler(comm).scale(w)).startswith(
        "a GradScaler scales tensors, and this is a DTensor of type f32[2@tp]."
    )


BLOCKS = """\
{name} is not right on the 6 blocks of parameters that it was given: its update of an element \
depends on others.

  blocks: f32[6@tp,4]

{instead}"""

PLAIN = """\
tree['a'] is a plain tensor of shape (3,), of which ranks may hold different ones.

Distribute it: distribute(tensor, layout, comm)."""

NO_TREE = """\
a ReLU is no pytree of DTensors.

Pass a list or dict of DTensors, nested as you like."""

KIND = """\
there is no norm of type 0.

Give a number above 0, or inf."""

NONFINITE = """\
the norm of type 2.0 of all gradients is inf.

Skip this step, or pass error_if_nonfinite=False to scale by it all the same."""

COMMS = """\
none of the 2 Comms of these DTensors has all of their ranks.

  comm 0: SimulatedComm(Mesh(a=9))
  comm 1: SimulatedComm(Mesh.from_ranks([20], ('b',)))

Make all of them with one Comm, whose mesh contains the others."""

SOME = """\
5 of 6 local tensors of f32[2@tp] have no gradient.

Compute the loss with the DTensor, not with some of its local tensors."""

SCALE = """\
LossScale(value=0.0, growth=2.0, backoff=0.5, interval=2000, streak=0) cannot be.

Let value be above 0 and within float32, growth 1 or more, backoff above 0 and 1 or less, interval \
and streak ints of at least 1 and 0."""


@pytest.mark.parametrize("choice", ["follow", "cheapest"])
@pytest.mark.parametrize("cut", [None, "a"])
def test_a_backward_within_a_budget_whose_reductions_travel_with_those_of_the_forward(choice, cut):
    mesh = Mesh(a=2)
    comm = SimulatedComm(mesh)
    table, x = torch.randn(16, 5), torch.randn(4, 6)

    def loss(table, x):
        return table[(x.abs() * 3).long().clamp(0, 15)].sum(1).square().mean()

    held = distribute(table, mesh.layout("a"), comm).requires_grad_()
    rows = distribute(x, mesh.layout(cut), comm)
    spmd(loss, max_bytes=10**6, choice=choice)(held, rows).backward()
    torch.testing.assert_close(held.grad.full(), torch.func.grad(loss)(table, x))


def test_the_program_of_a_backward_can_be_seen():
    mesh = Mesh(a=2)
    comm = SimulatedComm(mesh)
    w, x = (distribute(torch.ones(4, 4), mesh.layout(cut), comm) for cut in (None, "a"))
    step = spmd(lambda w, x: (x @ w).relu().sum(), choice="follow")
    with pytest.raises(TraceError, match="has no backward"):
        step.trace_backward(w, x)
    program = step.trace_backward(w.requires_grad_(), x)
    assert program.out_types == (w.type,)
    assert program.received_bytes == w.type.nbytes  # the gradient is reduced
    assert program.name.endswith(".backward")
