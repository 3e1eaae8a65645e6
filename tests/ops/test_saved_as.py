"""Tests of ops/saved_as.py and fdtensor/ops/saved_values.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor import func
from fdtensor.layouts.errors import LayoutError, TraceError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.pins import constrain
from fdtensor.ops.saved_as import saved_as
from fdtensor.programs.tracer import trace
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.calls import entry
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.spmd import spmd
from fdtensor.testing.strategies import layouts
from tests.support.depth import times

MESH = Mesh(dp=2, tp=2)
LINE = Mesh(tp=4)
few = settings(max_examples=times(5, 200))


def plain(x, w, mark):
    """A value that forward and backward read, through views too."""
    y = mark(x.sin())
    z = torch.tanh(y @ w) * y.t().reshape(4, 5)[:, :3].sum()
    return (z * z).sum() + (y * y).sum()


def twice(x, w, mark):
    """A value that is marked again, in another way, and a result that is marked."""
    y = mark(mark(torch.relu(x)) @ w)
    return (torch.sigmoid(y) * mark(y)).sum()


def inputs(x, w, mark):
    """Inputs that are marked."""
    return (mark(x) @ mark(w)).square().sum()


def stacked(x, w, mark):
    """A marked value under vmap."""
    return torch.vmap(lambda row: (mark(row.exp()) * row).sum())(x).square().sum() + w.sum()


def inner(x, w, mark):
    """A derivative inside, whose backward is differentiated too."""
    y = mark(x.sin())
    (grad,) = torch.func.grad(lambda y, w: ((mark(y * y)) @ w).sin().sum(), argnums=(0,))(y, w)
    return (grad * y).sum() + w.sum()


CASES = [plain, twice, inputs, inner]
X = torch.arange(20.0, dtype=torch.float64).reshape(4, 5) / 10 - 1
W = torch.arange(15.0, dtype=torch.float64).reshape(5, 3) / 7 - 1


def close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def alone(f, second=False):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    out = f(x, w, lambda y: y)
    grads = torch.autograd.grad(out, (x, w), create_graph=second)
    if second:
        grads = torch.autograd.grad(sum(g.sin().sum() for g in grads), (x, w))
    return [out.detach(), *grads]


def with_two_dims(layout):
    """A mark for matrices."""
    return lambda y: saved_as(y, layout) if y.ndim == 2 else y


@few
@given(
    st.sampled_from(CASES),
    layouts(MESH, (4, 5), partial=False),
    layouts(MESH, (5, 3), partial=False),
    layouts(MESH, (4, 3), partial=False),
)
def test_derivatives_inside_are_the_same(f, to_x, to_w, to):
    comm = SimulatedComm(MESH)
    kept = {(4, 5): to_x, (5, 3): to_w, (4, 3): to}
    x, w = distribute(X, to_x, comm), distribute(W, to_w, comm)

    def mark(y):
        return saved_as(y, kept[tuple(y.shape)]) if tuple(y.shape) in kept else y

    def both(x, w):
        return torch.func.grad_and_value(lambda x, w: f(x, w, mark), argnums=(0, 1))(x, w)

    grads, value = spmd(both)(x, w)
    close([t.full() for t in (value, *grads)], alone(f))


@few
@given(
    st.sampled_from(CASES[:3]),
    layouts(MESH, (4, 5), partial=False),
    layouts(MESH, (5, 3), partial=False),
    layouts(MESH, (4, 3), partial=False),
    st.booleans(),
)
def test_derivatives_outside_are_the_same(f, to_x, to_w, to, second):
    comm = SimulatedComm(MESH)
    kept = {(4, 5): to_x, (5, 3): to_w, (4, 3): to}
    full_x, full_w = X.clone().requires_grad_(), W.clone().requires_grad_()
    x, w = distribute(full_x, to_x, comm), distribute(full_w, to_w, comm)

    def mark(y):
        return saved_as(y, kept[tuple(y.shape)]) if tuple(y.shape) in kept else y

    out = spmd(lambda x, w: f(x, w, mark))(x, w).full()
    grads = torch.autograd.grad(out, (full_x, full_w), create_graph=second)
    if second:
        grads = torch.autograd.grad(sum(g.sin().sum() for g in grads), (full_x, full_w))
    close([out.detach(), *grads], alone(f, second))


def test_under_vmap_and_jvp():
    comm = SimulatedComm(LINE)
    x, w = distribute(X, LINE.layout("tp"), comm), distribute(W, LINE.layout(), comm)
    mark = lambda y: saved_as(y, LINE.layout("tp"))  # noqa: E731
    grads, value = spmd(
        lambda x, w: torch.func.grad_and_value(lambda *a: stacked(*a, mark), argnums=(0, 1))(x, w)
    )(x, w)
    close([t.full() for t in (value, *grads)], alone(stacked))

    def pushed(x, w):
        return torch.func.jvp(lambda x: plain(x, w, with_two_dims(LINE.layout("tp"))), (x,), (x,))

    wanted = torch.func.jvp(lambda x: plain(x, W, lambda y: y), (X,), (X,))
    close([t.full() for t in spmd(pushed)(x, w)], wanted)


def mlp(x, up, down, mark):
    """Megatron's MLP: its input is the same on every rank."""
    return torch.relu(mark(torch.tanh(x)) @ up) @ down


def types(mesh):
    return (
        TensorType((64, 32), torch.float32, mesh.layout()),
        TensorType((32, 64), torch.float32, mesh.layout(None, "tp")),
        TensorType((64, 32), torch.float32, mesh.layout("tp")),
    )


def test_one_program_frees_what_it_has_cut():
    to = LINE.layout("tp")

    def step(x, up, down, mark):
        return torch.func.grad(lambda w: mlp(x, *w, mark).square().sum())((up, down))

    before = trace(lambda *a: step(*a, lambda y: y), *types(LINE))
    after = trace(lambda *a: step(*a, lambda y: saved_as(y, to)), *types(LINE))
    assert after.peak_bytes == before.peak_bytes - 64 * 32 * 4 * 3 // 4
    assert after.received_bytes == before.received_bytes + 64 * 32 * 4 * 3 // 4
    assert str(after) == KEPT


def halves(monkeypatch, f, *args):
    """The forward and the backward that spmd makes of a function."""
    found = []
    real = entry.adjoint
    monkeypatch.setattr(entry, "adjoint", lambda *a: found.append(real(*a)) or found[-1])
    out = spmd(f)(*args)
    return found[0], out


@pytest.mark.parametrize("dim", [0, 1])
def test_between_forward_and_backward_there_is_only_a_block(monkeypatch, dim):
    comm = SimulatedComm(LINE)
    x, up, down = (
        distribute(torch.randn(t.shape), t.layout, comm).requires_grad_() for t in types(LINE)
    )
    to = LINE.layout(*[None] * dim, "tp")
    before, _ = halves(monkeypatch, lambda *a: mlp(*a, lambda y: y), x, up, down)
    after, _ = halves(monkeypatch, lambda *a: mlp(*a, lambda y: saved_as(y, to)), x, up, down)

    def kept(both):
        return sum(t.local_nbytes(0) for t in both.forward.out_types[len(both.out_types) :])

    # tanh reads its own result, which is the marked value
    assert kept(before) - kept(after) == 64 * 32 * 4 * 3 // 4
    assert before.forward.received_bytes == after.forward.received_bytes
    assert after.backward.received_bytes > before.backward.received_bytes


def test_views_of_what_is_kept_are_taken_again(monkeypatch):
    comm = SimulatedComm(LINE)
    x, up, _ = (
        distribute(torch.randn(t.shape), t.layout, comm).requires_grad_() for t in types(LINE)
    )

    def f(x, up, mark):
        return mark(torch.tanh(x)).t().reshape(32, 8, 8).movedim(0, -1) @ up

    to = LINE.layout("tp")
    after, _ = halves(monkeypatch, lambda x, up: f(x, up, lambda y: saved_as(y, to)), x, up)
    rest = after.forward.out_types[1:]
    assert [str(t) for t in rest if t.shape == (64, 32)] == ["f32[64@tp,32]"]
    assert sum(t.nbytes for t in rest) <= 2 * 64 * 32 * 4


def test_what_comes_cut_is_gathered_again(monkeypatch):
    """Sequence parallelism: the forward gathers, and what it gathered does not wait."""
    comm = SimulatedComm(LINE)
    made = [distribute(torch.randn(t.shape), t.layout, comm) for t in types(LINE)]
    made[0] = distribute(torch.randn(512, 32), LINE.layout("tp"), comm)
    tracked = [t.requires_grad_() for t in made]

    def f(x, up, down, mark):
        whole = mark(constrain(torch.tanh(x), LINE.layout()))
        return constrain(torch.relu(whole @ up), LINE.layout(None, "tp")) @ down

    to = LINE.layout("tp")
    after, _ = halves(monkeypatch, lambda *a: f(*a, lambda y: saved_as(y, to)), *tracked)
    rest = after.forward.out_types[len(after.out_types) :]
    before, _ = halves(monkeypatch, lambda *a: f(*a, lambda y: y), *tracked)
    assert "f32[512,32]" in map(str, before.forward.out_types[1:])
    assert "f32[512,32]" not in map(str, rest)
    assert "f32[512@tp,32]" in map(str, rest)
    assert after.forward.received_bytes == before.forward.received_bytes


def test_an_input_is_gathered_again_when_the_backward_reads_it():
    x, up, down = types(LINE)
    x = x.with_layout(LINE.layout("tp"))

    def gathered(x, up, down):
        whole = constrain(x, LINE.layout())
        f = lambda w: (torch.relu(saved_as(whole, LINE.layout("tp")) @ w[0]) @ w[1]).sum()  # noqa: E731
        return torch.func.grad(f)((up, down))

    ops = [str(eqn.op) for eqn in trace(gathered, x, up, down).eqns]
    assert ops.index("aten.alias.default") > ops.index("aten.relu.default")
    gathers = [i for i, op in enumerate(ops) if op.startswith("all_gather")]
    assert gathers[0] < ops.index("aten.relu.default") < gathers[-1]


def test_without_a_backward_it_is_nothing():
    marked = trace(lambda x: saved_as(x, LINE.layout("tp")) + 1, types(LINE)[0])
    assert str(marked) == str(trace(lambda x: x + 1, types(LINE)[0]))


def test_outside_of_a_traced_function_it_is_the_value():
    x = torch.randn(3)
    assert saved_as(x, LINE.layout("tp")) is x


def test_a_result_that_is_marked_is_the_value():
    comm = SimulatedComm(LINE)
    x = distribute(X, LINE.layout("tp"), comm)
    y, z = spmd(lambda x: (saved_as(x, LINE.layout()), saved_as(x.sin(), LINE.layout()).t()))(x)
    close([y.full(), z.full()], [X, X.sin().t()])


def test_a_dtensor_of_a_function_with_a_transform_around_is_saved_so_too():
    x = distribute(X, LINE.layout(), SimulatedComm(LINE))

    def loss(x):
        return (saved_as(x.tanh(), LINE.layout("tp")) ** 2).sum()

    close([func.grad(loss)(x).full()], [torch.func.grad(loss)(X)])
    marked = [str(eqn) for eqn in func.grad(loss).trace(x).eqns if "kept" in str(eqn)]
    assert len(marked) == 1


def test_what_is_no_layout_is_refused():
    with pytest.raises(LayoutError) as error:
        saved_as(torch.randn(3), "tp")
    assert str(error.value) == "'tp' is not a Layout.\n\nWrite mesh.layout('tp')."
    with pytest.raises(LayoutError, match="shards dim 2 of a tensor that has 2 dims"):
        trace(lambda x: saved_as(x, LINE.layout(None, None, "tp")), types(LINE)[0])
    with pytest.raises(TraceError, match="on another mesh than the arguments"):
        trace(
            torch.func.grad(lambda x: saved_as(x, Mesh(tp=2).layout("tp")).square().sum()),
            types(LINE)[0],
        )


KEPT = """\
<lambda> on Mesh(tp=4)
  in   a:f32[64,32]  b:f32[32,64@tp]  c:f32[64@tp,32]
  d:f32[64,32]         = tanh a
  e:f32[64@tp,32]      = slice[axis=tp dim=0] d
  f:f32[64,64@tp]      = mm d b
  g:f32[64,64@tp]      = relu f
  h:f32[64,32]{sum:tp} = mm g c
  i:f32[]              = full [] 1 dtype=float32 device=device(type='cpu')
  j:f32[64,32]         = expand i [64,32]
  k:f32[64,32]         = all_reduce[axis=tp reduce_op=sum] h  12 KiB
  l:f32[64,32]         = pow.Tensor_Scalar k 1.0
  m:f32[64,32]         = mul.Scalar l 2.0
  n:f32[64,32]         = mul.Tensor j m
  o:f32[64@tp,64]      = t g
  p:f32[64@tp,32]      = mm o n
  q:f32[32,64@tp]      = t c
  r:f32[64,64@tp]      = mm n q
  s:f32[64,64@tp]      = threshold_backward r g 0
  t:f32[64@tp,32]      = alias e  kept
  u:f32[64,32]         = all_gather[axis=tp dim=0] t  6144 B
  v:f32[32,64]         = t u
  w:f32[32,64@tp]      = mm v s
  out  w p
2 collectives, 18 KiB received per rank"""
