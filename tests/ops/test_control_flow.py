"""Control flow of torch in traced functions: branches and unrolled loops, and their derivatives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as torch_map
from torch.utils.checkpoint import checkpoint

import fdtensor as fd
from fdtensor import DTensor, Mesh, SimulatedComm, TensorType, distribute, spmd, trace
from fdtensor.errors import FallbackWarning, IndexRangeError, TraceError

MESH = Mesh(x=2)
COMM = SimulatedComm(MESH)
LAYOUTS = st.sampled_from([MESH.layout(), MESH.layout("x"), MESH.layout(None, "x")])


def on_mesh(t, layout):
    return distribute(t, layout, COMM)


def same(f, *args, of=None):
    """Whether a function of DTensors gives what it, or `of`, gives with full tensors."""
    full = [t.full() if isinstance(t, DTensor) else t for t in args]
    got, known = spmd(f)(*args), (of or f)(*full)
    leaves = torch.utils._pytree.tree_leaves
    got = [got] if isinstance(got, DTensor) else leaves(got)
    pairs = zip((t.full() for t in got), leaves(known), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)


# --- cond ------------------------------------------------------------------------------------


def added_through_a_view(y, w):
    y.mT.add_(w)
    return y


BRANCHES = {
    "matmul": lambda x, w: x @ w,
    "shift": lambda x, w: x + w[0, 0],
    "root": lambda x, w: (x - 3).sqrt() * w.sum(),
    "log": lambda x, w: x.log() + w,
    "write": lambda x, w: (x * 1).mul_(w),
    "view": lambda x, w: added_through_a_view(x * 1, w),
}


def taken(x, w, first, second):
    return BRANCHES[first](x, w) if x.sum() > 0 else BRANCHES[second](x, w)


def by_operands(x, w, first, second):
    return torch.cond(x.sum() > 0, BRANCHES[first], BRANCHES[second], (x, w))


def by_closures(x, w, first, second):
    f, g = BRANCHES[first], BRANCHES[second]
    return torch.cond(x.sum() > 0, lambda: f(x, w), lambda: g(x, w))


@given(
    st.sampled_from([*BRANCHES]),
    st.sampled_from([*BRANCHES]),
    st.sampled_from([by_operands, by_closures]),
    LAYOUTS,
    LAYOUTS,
    st.sampled_from([1, -1]),
)
@settings(max_examples=20)
def test_a_branch_counts_with_its_derivatives_alone(first, second, how, a, b, sign):
    generator = torch.Generator().manual_seed(3)
    x = on_mesh(sign * (4 + torch.rand(4, 4, generator=generator).double()), a)
    w = on_mesh(torch.rand(4, 4, generator=generator).double(), b)
    if "nan" in str(taken(x.full(), w.full(), first, second)):
        return  # where torch gives none, no number is to be compared
    same(lambda x, w: how(x, w, first, second), x, w, of=lambda x, w: taken(x, w, first, second))
    grads = [
        torch.func.grad(lambda x, w, f=f: f(x, w, first, second).sum(), (0, 1))
        for f in (how, taken)
    ]
    same(grads[0], x, w, of=grads[1])


@pytest.mark.parametrize("sign", [1, -1])
def test_derivatives_of_any_order_and_kind(sign):
    x = on_mesh(sign * torch.arange(1.0, 5.0), MESH.layout("x"))

    def f(x):
        return torch.cond(x.sum() > 0, lambda x: x**3, lambda x: (-x).log(), (x,))

    def plain(x):
        return x**3 if x.sum() > 0 else (-x).log()

    same(
        torch.func.hessian(lambda x: f(x).sum()),
        x,
        of=torch.func.hessian(lambda x: plain(x).sum()),
    )
    same(lambda x: torch.func.jvp(f, (x,), (x,)), x, of=lambda x: torch.func.jvp(plain, (x,), (x,)))
    same(torch.func.jacrev(f), x, of=torch.func.jacrev(plain))


def test_branches_in_one_another_and_with_pytrees():
    def f(x):
        def inner(x):
            return torch.cond(x.max() > 2, lambda x: {"a": x * 2}, lambda x: {"a": x - 1}, (x,))

        return torch.cond(x.sum() > 0, inner, lambda x: {"a": -x}, (x,))

    def plain(x):
        if x.sum() > 0:
            return {"a": x * 2} if x.max() > 2 else {"a": x - 1}
        return {"a": -x}

    for shift in (3.0, 0.1, -3.0):
        same(f, on_mesh(torch.ones(4) * shift, MESH.layout("x")), of=plain)


def test_a_predicate_for_each_entry_of_a_vmap():
    x = on_mesh(torch.tensor([[1.0, 2.0], [-3.0, 1.0]]), MESH.layout("x"))
    each = torch.vmap(lambda r: torch.cond(r.sum() > 0, lambda r: r * 2, lambda r: r - 1, (r,)))
    same(each, x, of=lambda x: torch.stack([r * 2 if r.sum() > 0 else r - 1 for r in x]))


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def one(self, x):
        return self.linear(x)

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.one, lambda x: x * 2, (x,))


class Plain(Gated):
    def forward(self, x):
        return self.one(x) if x.sum() > 0 else x * 2


@pytest.mark.parametrize("sign", [1, -1])
def test_parameters_of_a_module_in_a_branch_have_gradients(sign):
    torch.manual_seed(0)
    gated, plain = Gated(), Plain()
    params = {k: on_mesh(v.detach(), MESH.layout()) for k, v in gated.named_parameters()}
    x = on_mesh(sign * torch.ones(4, 4), MESH.layout("x"))

    def grad(module):
        return torch.func.grad(lambda p, x: torch.func.functional_call(module, p, (x,)).sum())

    same(
        grad(gated),
        params,
        x,
        of=lambda p, x: grad(plain)({k: v.full() for k, v in params.items()}, x),
    )


@pytest.mark.parametrize("i", [2, 9])
def test_faults_count_in_the_branch_that_counts(i):
    table = on_mesh(torch.arange(12.0).view(6, 2), MESH.layout("x"))
    index = on_mesh(torch.tensor([i]), MESH.layout())

    def looked_up(t, i):
        return torch.cond(i < 6, lambda: t[i], lambda: t[:1] * 0)

    same(looked_up, table, index, of=lambda t, i: t[i] if i.item() < 6 else t[:1] * 0)
    grad = torch.func.grad(lambda t, i: looked_up(t, i).sum())
    rows = spmd(grad)(table, index).full().sum()
    assert rows == (2 if i < 6 else 0)
    if i > 5:  # also where the branch came first
        with pytest.raises(IndexRangeError):
            spmd(lambda t, i: (looked_up(t, i), t[i]))(table, index)


def test_mistakes_in_branches():
    x = on_mesh(torch.ones(4), MESH.layout("x"))
    with pytest.raises(TraceError, match="the branches of cond give different results"):
        spmd(lambda x: torch.cond(x.sum() > 0, lambda x: x, lambda x: x[:2], (x,)))(x)

    def writes(x):
        y = x * 1
        torch.cond(x.sum() > 0, lambda: y.add_(1), lambda: y * 1)
        return y

    with pytest.raises(TraceError, match="a branch of cond writes by add_"):
        spmd(writes)(x)

    def writes_through_a_view(x):
        y = x * 1
        torch.cond(x.sum() > 0, lambda: y.view(2, 2).add_(1) * 1, lambda: y.view(2, 2) * 1)
        return y

    with pytest.raises(TraceError, match="a branch of cond writes to"):
        spmd(writes_through_a_view)(x)

    def normed(x):
        mean, var = torch.zeros(1) + x[0], torch.ones(1) + x[0]
        rows = x.view(4, 1)
        first = lambda: torch.nn.functional.batch_norm(rows, mean, var, training=True)  # noqa: E731
        return torch.cond(x.sum() > 0, first, lambda: rows * 1), mean

    with pytest.raises(TraceError, match="writes"):
        spmd(normed)(x)


@pytest.mark.parametrize("sign", [1, -1])
def test_what_does_not_count_does_not_run(sign):
    """The gathers and reductions of one branch, forward and backward, are not sent."""
    comm = SimulatedComm(MESH)
    x, w = (distribute(sign * torch.ones(4, 4), MESH.layout("x"), comm) for _ in "xw")

    def f(x, w):
        return torch.cond(x.sum() > 0, lambda: (x @ w).relu() @ w, lambda: x + 1)

    step = spmd(torch.func.grad(lambda x, w: f(x, w).sum(), (0, 1)), choice="follow")
    program = step.trace(x, w)
    comm.calls.clear()
    step(x, w)
    sent = sum(eqn.is_collective for eqn in program.eqns)
    assert sent > 2
    ran = sum(comm.calls.values())
    assert ran == sent if sign > 0 else ran == 1  # that of the predicate
    assert sum(" if " in line for line in str(program).splitlines()) > 15


def test_an_operand_of_both_branches_is_computed_once_and_in_any_case():
    x = TensorType((4,), torch.float32, MESH.layout("x"))

    def f(x):
        y = x.exp()
        return torch.cond(x.sum() > 0, lambda: y * 2, lambda: y + 1)

    text = str(trace(f, x))
    told = [line.rpartition(" if ")[2] for line in text.splitlines() if " if " in line]
    assert told == ["e", "not e"]


# --- loops -----------------------------------------------------------------------------------


def recurrent(w, x):
    def step(h, row):
        h = torch.tanh(h @ w + row)
        return h, h * row

    return scan(step, torch.zeros(4, dtype=x.dtype), x)


def recurrent_plainly(w, x):
    h, outs = torch.zeros(4, dtype=x.dtype), []
    for row in x:
        h = torch.tanh(h @ w + row)
        outs.append(h * row)
    return h, torch.stack(outs)


@given(LAYOUTS, LAYOUTS, st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=15)
def test_a_scan_and_its_gradient(a, b, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    w = on_mesh(torch.randn(4, 4, generator=generator).double(), a)
    x = on_mesh(torch.randn(steps, 4, generator=generator).double(), b)
    same(recurrent, w, x, of=recurrent_plainly)
    losses = [
        torch.func.grad(lambda w, x, f=f: sum(t.sum() for t in f(w, x)), (0, 1))
        for f in (recurrent, recurrent_plainly)
    ]
    same(losses[0], w, x, of=losses[1])


def test_scans_backwards_along_another_dim():
    x = on_mesh(torch.arange(12.0).view(3, 4), MESH.layout("x"))
    f = lambda x: scan(lambda c, v: (c + v, c * 1), torch.zeros(3), x, dim=1, reverse=True)  # noqa: E731
    same(f, x)


def test_a_carry_keeps_its_type():
    x = on_mesh(torch.ones(3), MESH.layout())
    with pytest.raises(TraceError, match="gives carry 0 another type"):
        spmd(lambda x: scan(lambda c, v: (c.double() + v, c * 1), torch.zeros(()), x))(x)


def test_a_map_is_one_op_for_all():
    x = on_mesh(torch.randn(4, 3), MESH.layout("x"))
    w = on_mesh(torch.randn(3, 3), MESH.layout())
    same(lambda x, w: torch_map(lambda r: (r @ w).relu(), x), x, w)
    program = trace(lambda x, w: torch_map(lambda r: (r @ w).relu(), x), x, w)
    assert sum(str(eqn.op) in ("aten.mm.default", "aten.bmm.default") for eqn in program.eqns) == 1
    assert not program.collectives


def test_a_map_of_what_does_not_run_on_all_at_once_runs_entry_by_entry_and_says_so():
    x = on_mesh(torch.randn(4, 3), MESH.layout("x"))

    def f(row):
        return torch.zeros(3).add_(row) * 2  # vmap refuses: the zeros are not mapped

    with pytest.warns(FallbackWarning, match="entry by entry"):
        same(lambda x: torch_map(f, x), x, of=lambda x: x * 2)


def test_an_associative_scan():
    x = on_mesh(torch.rand(6, 2), MESH.layout("x"))
    same(lambda x: associative_scan(lambda a, b: a * b + b, x, 0, combine_mode="generic"), x)
    both = (
        lambda x: associative_scan(torch.mul, x, 0, combine_mode="generic").sum(),
        lambda x: x.cumprod(0).sum(),
    )
    same(*map(torch.func.grad, both[:1]), x, of=torch.func.grad(both[1]))


# --- what takes tensors of torch alone -------------------------------------------------------


@pytest.mark.parametrize("transform", [fd.func.grad, fd.func.vmap], ids=["grad", "vmap"])
def test_a_dtensor_given_to_cond_is_told_how_to_write_it(transform):
    def by_sign(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).sum()

    def by_count(x):
        step = lambda i, x: (i + 1, 2 * x)  # noqa: E731
        count = torch.tensor(0)
        return while_loop(lambda i, x: i < 3, step, (count, x))[1].sum()

    x = on_mesh(torch.arange(8.0).view(2, 4), MESH.layout("x"))
    for f in (by_sign, by_count):
        with pytest.raises(TraceError, match="gives a DTensor to a function of torch") as told:
            transform(f)(x)
        assert "fd.spmd(torch.func.grad(f))" in str(told.value)
    same(torch.func.grad(by_sign), x, of=torch.cos)


def test_checkpoint_in_a_gradient_of_torch_func_computes_again():
    def f(x, w, through=lambda f, *args: checkpoint(f, *args, use_reentrant=False)):
        for _ in range(3):
            x = through(lambda x, w: (x @ w).sin(), x, w)
        return through(lambda x: torch.vmap(torch.exp)(x), x).sum()

    def plain(x, w):
        return f(x, w, lambda f, *args: f(*args))

    def backward(x, w):
        return torch.autograd.grad(f(x.requires_grad_(), w.requires_grad_()), (x, w))

    values = torch.rand(4, 6, dtype=torch.float64), torch.rand(6, 6, dtype=torch.float64)
    x, w = (on_mesh(t, MESH.layout()) for t in values)
    grads = torch.func.grad(plain, (0, 1))(*values)
    for by_program in (fd.grad(spmd(f), (0, 1)), spmd(torch.func.grad(f, (0, 1)))):
        for a, b in zip(by_program(x, w), grads, strict=True):
            assert torch.allclose(a.full(), b)
    program = spmd(torch.func.grad(f, (0, 1))).trace(x, w)
    kept = spmd(torch.func.grad(plain, (0, 1))).trace(x, w)
    assert program.peak_bytes < kept.peak_bytes
    assert program.peak_bytes == spmd(backward).trace(x, w).peak_bytes


def test_checkpoint_goes_around_scans_whose_inner_ones_read_what_is_outside():
    def f(x, w, over=fd.scan, through=lambda f, *args: checkpoint(f, *args, use_reentrant=False)):
        def outer(h, _):
            return over(lambda k, _: (k * w + h, k.sum()), h, None, 2)[0], h.sum()

        return (through(lambda x, w: over(outer, x, None, 2)[0], x, w) ** 2).sum()

    def unrolled(step, h, _, count):
        for _ in range(count):
            h, _ = step(h, None)
        return h, None

    def backward(x, w):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        f(x, w).backward()
        return x.grad, w.grad

    values = torch.arange(8.0).view(2, 4) / 8, torch.arange(4.0) / 4
    x, w = (on_mesh(t, MESH.layout()) for t in values)
    plain = torch.func.grad(lambda *a: f(*a, unrolled, lambda f, *args: f(*args)), (0, 1))
    for by_program in (fd.grad(spmd(f), (0, 1)), spmd(backward)):
        for a, b in zip(by_program(x, w), plain(*values), strict=True):
            assert torch.allclose(a.full(), b)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum()),
        lambda f: torch.func.vmap(torch.func.grad(f)),
        lambda f: torch.func.grad(lambda x: torch.func.vmap(f)(x).sum()),
        lambda f: torch.func.jacrev(lambda x: f(x)[None]),
        torch.func.hessian,
        lambda f: lambda x: torch.func.jvp(torch.func.grad(f), (x,), (x,)),
        lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones(())),
    ],
)
def test_checkpoint_in_several_derivatives_is_told_where_it_stands(transform):
    def f(x):
        return checkpoint(torch.sin, x, use_reentrant=False).sum()

    x = on_mesh(torch.arange(8.0), MESH.layout("x"))
    with pytest.raises(TraceError, match="saved tensor hooks") as told:
        spmd(transform(f))(x)
    assert "stands in one derivative" in str(told.value)
    with pytest.raises(RuntimeError, match="saved tensor hooks"):  # outside it is as it was
        torch.func.grad(f)(torch.arange(8.0))


OTHERWISE = {
    "one_hot": lambda i: torch.nn.functional.one_hot(i, 4).float(),
    "bincount": lambda i: i.bincount(minlength=4).float().expand(4, 4),
    "circular": lambda i: torch.nn.functional.pad(
        i.float().expand(4, 4)[None, None], (1, 0, 0, 0), "circular"
    )[0, 0, :, 1:],
}
"""Functions of torch that read values, or hide what moves, and are recorded in other ops."""


def by_cond(f, i):
    return torch.cond(i.sum() > 0, f, lambda i: f(i) * 2, (i,))


def by_while_loop(f, i):
    first = torch.zeros((), dtype=torch.int64), torch.zeros(4, 4)
    return while_loop(lambda n, _: n < 2, lambda n, y: (n + 1, y + f(i)), first)[1]


def by_scan(f, i):
    return scan(lambda y, _: (y + f(i), y.sum()), torch.zeros(4, 4), torch.zeros(2))[0]


@pytest.mark.parametrize("way", [by_cond, by_while_loop, by_scan])
@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_recorded_otherwise_is_so_in_functions_of_control_flow(way, name):
    i, f = torch.tensor([3, 0, 1, 1]), OTHERWISE[name]
    steps = 1 if way is by_cond else 2
    found = spmd(lambda i: way(f, i))(on_mesh(i, MESH.layout("x")))
    assert torch.equal(found.full(), f(i) * steps)
