"""Transforms of `torch.func` in the steps of a scan and of other loops, and around them."""

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan as torch_scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.functional import binary_cross_entropy_with_logits

import fdtensor as fd
from fdtensor import Mesh, Program, SimulatedComm, distribute, spmd
from fdtensor.errors import TraceError
from fdtensor.random import key
from tests.ops.test_loops import results
from tests.ops.test_scans import WAYS, XS, Squared, V, W, drawn

MESH = Mesh(x=2, y=2)
COMM = SimulatedComm(MESH)
by = torch.func


def energy(q, w):
    return torch.sin(q @ w).square().sum()


def one(q, w):
    return torch.tanh(w @ q)


def squares(q, rows):
    """What gives a gradient of a gradient."""
    return by.grad(lambda u: energy(u, rows))(q).square().sum()


STEPS = {
    "grad": lambda c, x, w: c - by.grad(energy)(c, w) * x,
    "grad of what is around": lambda c, x, w: c - by.grad(lambda w: energy(c, w))(w.T)[0] * x,
    "grad by argnums": lambda c, x, w: by.grad(energy, (0, 1))(x, w)[1] @ c,
    "grad_and_value": lambda c, x, w: sum(by.grad_and_value(lambda q: energy(q + x, w))(c)).tanh(),
    "grad of grad": lambda c, x, w: by.grad(squares)(c * x, w).tanh(),
    "vjp": lambda c, x, w: by.vjp(lambda q: one(q, w), c)[1](x)[0],
    "jvp": lambda c, x, w: sum(by.jvp(lambda q, w: one(q, w), (c, w), (x, w.T))).tanh(),
    "vmap": lambda c, x, w: by.vmap(torch.mul)(c, x).tanh() + w[0],
    "vmap over what is around": lambda c, x, w: by.vmap(lambda row: row @ c * x.sum())(w).tanh(),
    "vmap along dims": lambda c, x, w: (
        by.vmap(one, (None, 1), 1)(c, torch.stack([w, w * 2], 1)).sum(1).mul(x).tanh()
    ),
    "vmap of grad": lambda c, x, w: by.vmap(by.grad(lambda q, r: energy(q * c, w) * r))(
        torch.stack([c, x]), x[:2]
    ).sum(0),
    "vmap of grad of a view": lambda c, x, w: (
        by.vmap(by.grad(lambda q, row: (q @ row) ** 2), (None, 0))(c, w.T).sum(0) * x
    ),
    "grad of vmap": lambda c, x, w: by.grad(
        lambda q: by.vmap(lambda row, e: (row * q).sin().sum() * e)(w, x).sum()
    )(c),
    "jacrev": lambda c, x, w: by.jacrev(one)(c, w) @ x,
    "jacfwd": lambda c, x, w: by.jacfwd(one)(c, w) @ x,
    "fd.grad": lambda c, x, w: c - fd.grad(energy)(c, w) * x,
    "fd.vmap": lambda c, x, w: fd.vmap(fd.grad(lambda row: (row @ c).sin()))(w)[0] * x,
    "fd.vjp": lambda c, x, w: fd.vjp(lambda q: one(q, w), c)[1](x)[0],
    "fd.jvp": lambda c, x, w: fd.jvp(lambda q: one(q, w), (c,), (x,))[1],
    "fd.hessian": lambda c, x, w: (fd.hessian(lambda q: one(q, w).sum())(c) @ x).tanh(),
    "grad of a scan": lambda c, x, w: by.grad(
        lambda q: fd.scan(lambda h, row: (torch.tanh(h * row + x), None), q, w)[0].sum()
    )(c),
    "a function of its own": lambda c, x, w: Squared.apply(w) @ c * x,
}
"""What a step makes of a carry, an entry and what it reads of around."""

AROUND = {
    **WAYS,
    "jacrev": lambda f: by.jacrev(f, 2),
    "fd.grad": lambda f: fd.grad(f, (0, 1)),
    "vmap over entries": lambda f: (
        lambda w, xs, v: by.vmap(f, (None, 0, None))(w, torch.stack([xs, -xs]), v)
    ),
}

CASES = [(name, way) for name in STEPS for way in AROUND]
CASES = [(n, w) for n, w in CASES if n != "a function of its own" or w not in ("jvp", "curvature")]


def scanning(step):
    """A loss of a scan with this step, which reads `w` and `v` from around it."""

    def loss(w, xs, v):
        c, ys = fd.scan(lambda c, x: (step(c, x, w) + v, (c * x).sum()), v, xs)
        return (c * c).sum() + (ys**3).sum()

    return loss


def there(*tensors):
    """The tensors on a mesh, cut along its axes."""
    return [distribute(t, MESH.layout(*("x", "y", None)[: t.ndim]), COMM) for t in tensors]


def assert_alike(out, plain):
    for own, due in zip(results(out), results(plain), strict=True):
        torch.testing.assert_close(own, due.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.few(10)
@pytest.mark.one_of("way")
@pytest.mark.parametrize("way", AROUND)
@pytest.mark.parametrize("name", STEPS)
def test_transforms_in_a_step_and_around_give_what_torch_gives(name, way):
    if (name, way) not in CASES:
        pytest.skip("torch has no forward derivative of it")
    f = AROUND[way](scanning(STEPS[name]))
    args = there(W, XS, V)
    assert_alike(spmd(f)(*args), f(W, XS, V))
    program = spmd(f).trace(*args)
    assert Program.from_json(program.to_json()).digest == program.digest


@pytest.mark.few(6)
@pytest.mark.parametrize("name", STEPS)
def test_transforms_in_a_step_op_by_op(name):
    def f(w, xs, v):
        step = lambda s, x: ((STEPS[name](s[0], x, s[1]) + s[0], s[1]), s[0] * x)  # noqa: E731
        return fd.scan(step, (v, w), xs)

    assert_alike(f(*there(W, XS, V)), f(W, XS, V))


def test_a_step_op_by_op_reads_tensors_from_around():
    def f(w, xs, v):
        step = lambda c, x: (fd.grad(energy)(c, w) * x + fd.vmap(torch.mul)(c, v), None)  # noqa: E731
        return fd.scan(step, v, xs)[0]

    assert_alike(f(*there(W, XS, V)), f(W, XS, V))


def backward(f, *tensors):
    """The gradients that `backward` leaves of a function, and those of a program of it."""
    held, known = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    spmd(f)(*there(*held)).full().backward()
    f(*known).backward()
    pairs = zip(held, known, strict=True)
    return [(a.grad, torch.zeros_like(a) if b.grad is None else b.grad) for a, b in pairs]


@pytest.mark.few(6)
@pytest.mark.parametrize("name", STEPS)
def test_backward_through_a_step_with_transforms(name):
    assert_alike(*zip(*backward(scanning(STEPS[name]), W, XS, V), strict=True))


# --- autograd in a step ------------------------------------------------------------------------


def asked(c, x, w):
    q = c.detach().requires_grad_()
    return c - torch.autograd.grad(energy(q, w), q)[0] * x


def asked_twice(c, x, w):
    c = c.requires_grad_()
    return c - torch.autograd.grad(energy(c, w), c, create_graph=True)[0] * x


def left(c, x, w):
    q = c.detach().requires_grad_()
    energy(q, w.detach()).backward()
    return c - q.grad * x


@pytest.mark.parametrize("step", [asked, asked_twice, left])
def test_autograd_in_a_step(step):
    assert_alike(spmd(scanning(step))(*there(W, XS, V)), scanning(step)(W, XS, V.clone()))
    assert_alike(*zip(*backward(scanning(step), W, XS, V), strict=True))


MODEL = torch.nn.Linear(4, 4, dtype=torch.float64)


def lost(c, x, w):
    MODEL(c).sum().backward()
    return c * x


def kept():
    entries = []

    def step(c, x, _):
        by.vmap(lambda e: entries.append(e) or e)(c)
        return x * entries[-1]

    return step


REFUSED = {
    "calls requires_grad_() inside of a transform of torch.func": (asked, by.grad),
    "backward() in a step of a scan leaves a gradient in a tensor that the step": (lost, None),
    "of what was computed from nothing that requires one": (
        lambda c, x, w: torch.autograd.grad(energy(c, w), c)[0] * x,
        by.grad,
    ),
    "reads a tensor of an entry outside of the vmap that made it": (kept(), None),
    "a step of a scan writes to a tensor from around it": (
        lambda c, x, w: by.vmap(lambda row: row.add_(1))(w.T)[0] * x * c,
        None,
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_no_step_can_do_is_told(text):
    step, transform = REFUSED[text]
    f = scanning(step) if transform is None else transform(scanning(step))
    with pytest.raises(TraceError) as told:
        spmd(f)(*there(W, XS, V))
    assert text in str(told.value)


# --- other loops -------------------------------------------------------------------------------


def in_python(condition, step, carried):
    while condition(*carried):
        carried = step(*carried)
    return carried


LOOPS = {
    "cond": (
        lambda cond, s: lambda w, xs, v: cond(v.sum() > -9, lambda: s(v, xs[0], w), lambda: v * 2),
        torch.cond,
        lambda _, f, g: f(),
    ),
    "while_loop": (
        lambda loop, s: (
            lambda w, xs, v: loop(
                lambda i, _: i < 3, lambda i, c: (i + 1, s(c, xs[0], w)), (torch.tensor(0), v)
            )[1]
        ),
        while_loop,
        in_python,
    ),
    "map": (
        lambda each, s: lambda w, xs, v: each(lambda x: s(v, x, w), xs),
        torch_map,
        lambda f, xs: torch.stack([f(x) for x in xs]),
    ),
    "scan": (
        lambda scan, s: lambda w, xs, v: scan(lambda c, x: (s(c, x, w) + v, c * 1), v, xs)[0],
        torch_scan,
        fd.scan,
    ),
}


@pytest.mark.few(10)
@pytest.mark.one_of("kind")
@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("name", STEPS)
def test_transforms_in_other_loops(name, kind):
    made, loop, plain = LOOPS[kind]
    f, due = made(loop, STEPS[name]), made(plain, STEPS[name])
    args = there(W, XS, V)
    assert_alike(spmd(f)(*args), due(W, XS, V))
    if kind != "while_loop":  # which has no derivative
        whole = [by.grad(lambda *args, g=g: g(*args).square().sum(), (0, 1, 2)) for g in (f, due)]
        assert_alike(spmd(whole[0])(*args), whole[1](W, XS, V))


def test_transforms_in_an_associative_scan():
    f = lambda xs: associative_scan(  # noqa: E731
        lambda p, q: by.vmap(torch.add)(p, by.grad(lambda u: (u * u * 0.5).sum())(q)),
        xs,
        0,
        combine_mode="generic",
    )
    assert_alike(spmd(f)(*there(XS)), XS.cumsum(0))
    grads = [by.grad(lambda xs, g=g: (g(xs) ** 2).sum()) for g in (f, lambda xs: xs.cumsum(0))]
    assert_alike(spmd(grads[0])(*there(XS)), grads[1](XS))


@pytest.mark.parametrize("transform", [by.grad, None])
def test_what_is_read_without_a_derivative_first_has_one_later(transform):
    """In a branch, the gate of a tensor is made where it is read first."""

    def loss(w, taken):
        def scaled():
            with torch.no_grad():
                most = w.max()
            return (w * most).sum() + Squared.apply(w).sum()

        return torch.cond(taken, scaled, lambda: w.sum())

    due = torch.zeros(4, 4, dtype=torch.float64) + W.max() + 3 * W
    if transform is not None:
        assert_alike(spmd(transform(loss))(*there(W, torch.tensor(1) > 0)), due)
        return
    w = W.clone().requires_grad_()
    spmd(loss)(*there(w, torch.tensor(1) > 0)).full().backward()
    assert_alike(w.grad, due)


# --- what they are for -------------------------------------------------------------------------


def leapfrog(state, _):
    q, p = state
    p = p - 0.1 * by.grad(energy)(q, W)
    return (q + 0.1 * p, p), None


def hamiltonian(q, moments, draws):
    """Samples, by a scan in each step of a scan."""

    def total(q, p):
        return energy(q, W) + p.square().sum() / 2

    def step(q, drawn):
        p, u = drawn
        (moved, turned), _ = fd.scan(leapfrog, (q, p), length=3)
        taken = u < torch.exp(total(q, p) - total(moved, turned))
        q = torch.where(taken, moved, q)
        return q, q

    return fd.scan(step, q, (moments, draws))[1]


def test_samples_by_derivatives():
    draws = drawn(5, seed=7).abs()
    assert_alike(spmd(hamiltonian)(*there(V, XS, draws)), hamiltonian(V, XS, draws))
    chains = by.vmap(hamiltonian, (0, 1, None))
    given = XS[:3], torch.stack([XS, XS * 2, -XS], 1), draws
    assert_alike(spmd(chains)(*there(*given)), chains(*given))
    noisy = lambda q, _: (q - by.grad(energy)(q, W) + torch.randn_like(q), None)  # noqa: E731
    out = spmd(lambda q: fd.scan(noisy, q, length=3)[0])(*there(V), key=key(0))
    assert out.full().isfinite().all()


def test_an_inner_loop_of_training():
    model = torch.nn.Linear(4, 1, dtype=torch.float64)

    def losses(xs):
        def step(p, x):
            loss = lambda p: by.functional_call(model, p, (x,)).square().sum()  # noqa: E731
            grads, value = by.grad_and_value(loss)(p)
            return {k: p[k] - 0.1 * grads[k] for k in p}, value

        return fd.scan(step, {k: p.detach() for k, p in model.named_parameters()}, xs)[1].sum()

    for f in (losses, by.grad(losses)):
        assert_alike(spmd(f)(*there(XS)), f(XS))


def test_gradients_of_each_sample():
    def step(q, x):
        loss = lambda q: binary_cross_entropy_with_logits(x @ q, torch.ones(4))  # noqa: E731
        return q - by.vmap(by.grad(loss))(q), None

    f = lambda q, xs: fd.scan(step, q, xs)[0]  # noqa: E731
    q, xs = drawn(6, 3).float(), drawn(5, 4, 3, seed=1).float()
    torch.testing.assert_close(spmd(f)(*there(q, xs)).full(), f(q, xs))
