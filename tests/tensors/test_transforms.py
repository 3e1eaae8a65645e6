"""`fd.func`: around functions of DTensors the transforms are those of torch around plain ones."""

import functools
import gc
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor import func
from fdtensor.layouts.errors import FdtensorError, ValueTreeError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Shard
from fdtensor.ops.pins import constrain
from fdtensor.programs.options import like
from fdtensor.programs.tracer import trace
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.call import call
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.scan import scan
from fdtensor.tensors.spmd import spmd
from fdtensor.testing.strategies import types
from fdtensor.testing.tensor_strategies import sharded
from tests.tensors.test_tensor_like import same

few = settings(max_examples=settings.default.max_examples // 8)

X = torch.arange(-4.0, 4.0, dtype=torch.float64).reshape(2, 4)
W = torch.arange(8.0, dtype=torch.float64).reshape(4, 2) - 3


def product(x, w):
    return x @ w


def cubed(x, w):
    return (x * x * x).T * w


def normed(x, w):
    return (x @ w).T + w.sum(0, keepdim=True) * x.sum()


BODIES = (product, cubed, normed)


def whole(f):
    return spmd(f)


def stepwise(f):
    """A function of DTensors that computes by `call` and by operators, and moves in between."""

    def g(x, w):
        mesh = x.mesh
        y = call(f, x.redistribute(mesh.layout()), w)
        return y.redistribute(mesh.layout(*mesh.axes[:1]))

    return g


def within(f):
    """An spmd function of another one."""
    inner = spmd(f)
    return spmd(lambda x, w: inner(x, w))


def partly(f):
    """Some of it is a full tensor, which each rank has."""
    inner = spmd(f)
    return lambda x, w: inner(x, w) + 0 * x.full().sum()


WAYS = (whole, stepwise, within, partly)


def summed(f):
    return lambda *args: f(*args).sum()


def cases():
    """Each transform as a pair: around a function of DTensors, and around one of tensors."""
    torchs = torch.func
    yield "grad", lambda f: func.grad(summed(f)), lambda f: torchs.grad(summed(f))
    yield "grad of w", lambda f: func.grad(summed(f), 1), lambda f: torchs.grad(summed(f), 1)
    yield (
        "grad and value",
        lambda f: func.grad_and_value(summed(f), (0, 1)),
        lambda f: torchs.grad_and_value(summed(f), (0, 1)),
    )
    yield "jacrev", lambda f: func.jacrev(f, 1), lambda f: torchs.jacrev(f, 1)
    yield "jacfwd", lambda f: func.jacfwd(f, (0, 1)), lambda f: torchs.jacfwd(f, (0, 1))
    yield "hessian", lambda f: func.hessian(summed(f)), lambda f: torchs.hessian(summed(f))
    yield (
        "jvp",
        lambda f: lambda x, w: func.jvp(f, (x, w), (x, w)),
        lambda f: lambda x, w: torchs.jvp(f, (x, w), (x, w)),
    )
    yield "vjp", _pulled(func.vjp), _pulled(torchs.vjp)
    yield (
        "grad of grad",
        lambda f: func.grad(lambda x, w: (func.grad(summed(f))(x, w) ** 2).sum()),
        lambda f: torchs.grad(lambda x, w: (torchs.grad(summed(f))(x, w) ** 2).sum()),
    )
    yield (
        "grad of vjp",
        lambda f: func.grad(lambda x, w: (_pulled(func.vjp)(f)(x, w)[1][0] ** 2).sum(), 1),
        lambda f: torchs.grad(lambda x, w: (_pulled(torchs.vjp)(f)(x, w)[1][0] ** 2).sum(), 1),
    )


def _pulled(vjp):
    def around(f):
        def g(x, w):
            y, back = vjp(f, x, w)
            return y, back(y + y)

        return g

    return around


CASES = {name: pair for name, *pair in cases()}


@pytest.mark.parametrize("name", CASES)
@few
@given(sharded((X, W)), st.sampled_from(BODIES), st.sampled_from(WAYS))
def test_a_transform_gives_what_torch_gives(name, args, body, way):
    around, plain = CASES[name]
    same(around(way(body))(*args), plain(body)(X, W))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", BODIES)
def test_the_order_of_memory_is_nothing_to_a_hessian(body, way):
    around, plain = CASES["hessian"]
    same(around(way(body))(by_rows(X), by_rows(W)), plain(body)(X, W))


@few
@given(sharded((X, W)), st.sampled_from(BODIES))
def test_around_gives_the_layouts_of_inside(args, body):
    inside = spmd(torch.func.grad(lambda x, w: body(x, w).sum(), (0, 1)))(*args)
    around = func.grad(lambda x, w: spmd(body)(x, w).sum(), (0, 1))(*args)
    assert [x.type for x in inside] == [x.type for x in around]


ROWS = {
    "each": lambda v, w: v * v.sum() + w[:, 0],
    "two": lambda v, w: (v @ w, v.sum()),
    "softly": lambda v, w: torch.where(v > 0, v, 0) @ w,
}


@few
@given(sharded((X, W)), st.sampled_from(sorted(ROWS)), st.booleans(), st.sampled_from([0, 1]))
def test_vmap_goes_over_a_dim_however_it_is_cut(args, name, by_spmd, dim):
    body = ROWS[name]
    x, w = (X, W) if dim == 0 else (X.T, W)
    if dim == 1:
        args = call(torch.t, args[0]), args[1]
    f = spmd(body) if by_spmd else body
    options = {"in_dims": (dim, None)}
    same(func.vmap(f, **options)(*args), torch.func.vmap(body, **options)(x, w))


@few
@given(sharded((X, W)))
def test_vmap_of_grad_gives_a_gradient_for_each_sample(args):
    loss = lambda v, w: ((v @ w) ** 2).sum()  # noqa: E731
    each = func.vmap(func.grad(lambda v, w: spmd(loss)(v, w), 1), (0, None))(*args)
    same(each, torch.func.vmap(torch.func.grad(loss, 1), (0, None))(X, W))


def laid_out(program):
    """The layouts of the values of a program."""
    return {type.layout for type in program.types}


class Runs:
    """A count that no program depends on: attributes of objects further down are not read."""

    count = 0


MESH = Mesh(dp=2, tp=2)
COMM = SimulatedComm(MESH)


def test_an_axis_cuts_the_further_dim_of_what_is_pinned():
    x = distribute(X, MESH.layout("dp", "tp"), COMM)
    pinning = lambda v: constrain(v * 2, MESH.layout("tp"))  # noqa: E731
    program = func.vmap(pinning, spmd_axis_name="dp").trace(x)
    assert program.received_bytes == 0
    assert MESH.layout("dp", "tp") in laid_out(program)
    without = func.vmap(pinning).trace(x)
    assert MESH.layout(None, "tp") in laid_out(without)
    by_method = func.vmap(lambda v: v.redistribute(MESH.layout("tp")), spmd_axis_name="dp")
    assert by_method(x).layout is MESH.layout("dp", "tp")
    with pytest.raises(FdtensorError, match="'dp'"):
        func.vmap(lambda v: constrain(v, MESH.layout("dp")), spmd_axis_name="dp")(x)


def test_a_transform_has_one_program_for_arguments_of_the_same_types():
    runs = Runs()

    def loss(x, w):
        runs.count += 1
        return (x @ w).sum()

    step, counts = func.grad(loss), []
    for scale in range(3):
        x = distribute(X * scale, MESH.layout("dp"), COMM)
        w = distribute(W, MESH.layout(None, "tp"), COMM)
        same(step(x, w), torch.func.grad(lambda x, w: (x @ w).sum())(X * scale, W))
        counts.append(runs.count)
    for _ in range(2):
        same(func.grad(loss)(x, w), step(x, w).full())  # made anew around the same function
        counts.append(runs.count)
    assert len(set(counts)) == 1


def test_without_dtensors_they_are_those_of_torch():
    assert torch.equal(func.grad(lambda x: (x * x).sum())(X), 2 * X)
    y, back = func.vjp(lambda x: x * x, X)
    assert torch.equal(back(y)[0], 2 * X**3)


def test_aux_comes_back_as_it_is():
    x = distribute(X, MESH.layout("dp"), COMM)
    grad, aux = func.grad(lambda x: ((x * x).sum(), {"twice": x + x}), has_aux=True)(x)
    same((grad, aux["twice"]), (2 * X, 2 * X))
    y, back, aux = func.vjp(lambda x: (x * x, x + x), x, has_aux=True)
    same((y, aux, back(y)[0]), (X * X, 2 * X, 2 * X * X * X))
    assert not aux.requires_grad
    assert not y.requires_grad


def test_pytrees_keep_their_structure():
    w, x = distribute(W, MESH.layout("tp"), COMM), distribute(X, MESH.layout(), COMM)
    params = {"w": w, "b": [x]}
    grads = func.grad(lambda p: (p["w"].T * p["b"][0]).sum())(params)
    same(grads, {"w": X.T, "b": [W.T]})
    y, back = func.vjp(lambda p: {"y": p["w"]}, params)
    same(back(y), ({"w": W, "b": [0 * X]},))
    with pytest.raises(ValueTreeError, match="do not have the structure of the results"):
        back([y["y"]])


def test_gradients_flow_through_what_transforms_give():
    x = distribute(X, MESH.layout("dp"), COMM).detach().requires_grad_()
    func.grad(lambda x: (x * x * x).sum())(x).sum().backward()
    same(x.grad, 6 * X)
    x = distribute(X, MESH.layout("dp"), COMM).detach().requires_grad_()
    y, back = func.vjp(lambda x: x * x * x, x)
    back(y)[0].sum().backward()
    p = X.clone().requires_grad_()
    z, plain = torch.func.vjp(lambda x: x * x * x, p)
    plain(z)[0].sum().backward()
    same(x.grad, p.grad)


# --- parts inside of one another ------------------------------------------------------------------


@few
@given(sharded((X, W)))
def test_a_function_of_dtensors_inside_of_another_is_a_part_of_its_program(args):
    inner = spmd(product)
    nested = trace(lambda x, w: inner(x, w) * 2, *args)
    flat = trace(lambda x, w: product(x, w) * 2, *args)
    assert str(nested).partition("\n")[2] == str(flat).partition("\n")[2]
    by_call = trace(lambda x, w: call(product, x, w) * 2, *args)
    assert str(by_call).partition("\n")[2] == str(flat).partition("\n")[2]
    same(spmd(lambda x, w: inner(x, w) * 2)(*args), product(X, W) * 2)


def test_layouts_that_an_inner_function_asks_for_are_pinned():
    x = distribute(X, MESH.layout("dp", "tp"), COMM)
    inner = spmd(lambda x: x + 1, out_layouts=MESH.layout(None, "dp"))
    program = trace(inner, x)
    assert MESH.layout(None, "dp") in laid_out(program)
    inner = spmd(lambda x: x + 1, out_layouts=like(0))
    assert laid_out(trace(inner, x)) == {x.layout}


@few
@given(sharded((X, W)))
def test_a_dtensor_that_is_closed_over_is_an_argument(args):
    x, w = args
    closed = spmd(lambda x: x @ w + w.sum())
    same(closed(x), X @ W + W.sum())
    program = trace(lambda x: x @ w, x)
    assert program.in_types == (x.type, w.type)
    assert program.received_bytes == trace(product, x, w).received_bytes
    w = w.detach().requires_grad_()
    spmd(lambda x: x @ w)(x).sum().backward()
    same(w.grad, torch.func.grad(lambda w: (X @ w).sum())(W))
    same(func.grad(lambda x: (x @ w).sum())(x), torch.func.grad(lambda x: (x @ W).sum())(X))


def test_what_is_closed_over_is_read_at_each_call():
    x = distribute(X, MESH.layout("dp"), COMM)
    runs = Runs()

    def f(x):
        runs.count += 1
        return x @ w

    step, counts = spmd(f), []
    for scale in range(3):
        w = distribute(W * scale, MESH.layout(None, "tp"), COMM)
        same(step(x), X @ W * scale)
        counts.append(runs.count)
    assert len(set(counts)) == 1
    w = distribute(W, MESH.layout("tp"), COMM)
    same(step(x), X @ W)


def test_a_dtensor_of_another_comm_is_refused():
    x = distribute(X, MESH.layout("dp"), COMM)
    w = distribute(W, MESH.layout(), SimulatedComm(MESH))
    with pytest.raises(FdtensorError, match="another Comm"):
        spmd(lambda x: x @ w)(x)


@few
@given(types(dtype=torch.float64, kinds=[Shard]))
def test_records_inside_have_the_types_that_are_known(type):
    seen = []

    def f(x):
        y = x.redistribute(x.mesh.layout())
        seen.append((x.type, y.type.layout, y.full().shape, (x + y).type.shape))
        return y.sum()

    x = distribute(torch.ones(type.shape, dtype=type.dtype), type.layout, _comm(type))
    func.grad(f)(x)
    assert seen[0] == (x.type, x.mesh.layout(), type.shape, type.shape)


def _comm(type):
    return SimulatedComm(Mesh(world=1 + max(type.mesh.ranks)))


def test_what_is_closed_over_goes_with_its_function():
    x = distribute(X, MESH.layout("dp"), COMM)

    def ran():
        w = distribute(W, MESH.layout(None, "tp"), COMM).detach().requires_grad_()
        call(lambda x: x @ w, x).sum().backward()
        func.grad(lambda x: (x @ w).sum())(x)
        y, back = func.vjp(lambda x: x @ w, x)
        back(y)
        return ref(w.local[0])

    held = ran()
    gc.collect()
    assert held() is None


# --- what an outsider's generator showed -----------------------------------------------------


def by_rows(t):
    return distribute(t, MESH.layout("dp"), COMM)


def through(h, xs):
    return scan(lambda h, a: (torch.tanh(h + a), h), h, xs)[0].sum()


def test_a_scan_stands_in_a_transform():
    h, xs = torch.linspace(-1, 1, 2), torch.linspace(0, 1, 6).view(3, 2)
    got = func.grad(through, argnums=(0, 1))(by_rows(h), distribute(xs, MESH.layout(), COMM))
    wanted = torch.func.grad(through, argnums=(0, 1))(h, xs)
    assert all(torch.allclose(a.full(), b) for a, b in zip(got, wanted, strict=True))
    over = func.vmap(through, in_dims=(0, None))(by_rows(h.expand(4, 2)), by_rows(xs[:2]))
    assert over.shape == (4,)


def test_a_function_that_is_recorded_in_another_way_stands_in_a_transform():
    def loss(x):
        return torch.nn.functional.gaussian_nll_loss(x, x * 2, x.abs() + 0.1)

    x = torch.linspace(1, 2, 4)
    assert torch.allclose(func.grad(loss)(by_rows(x)).full(), torch.func.grad(loss)(x))


def test_a_write_in_a_transform_is_told_as_outside_of_one():
    with pytest.raises(FdtensorError) as error:
        func.grad(lambda x: x.mul_(2).sum())(by_rows(torch.ones(4)))
    assert error.value.sentence == "a DTensor has no attribute 'mul_'."


@pytest.mark.parametrize("name", ["grad", "vjp", "jacrev", "vmap", "hessian", "jacfwd"])
def test_the_transforms_of_torch_name_ours(name):
    x, transform = by_rows(torch.ones(4)), getattr(torch.func, name)
    go = functools.partial(transform, torch.sin, x) if name == "vjp" else transform(torch.sum)
    with pytest.raises((ValueError, RuntimeError, FdtensorError), match=r"fd\.grad, fd\.grad_and"):
        go(*[x] * (name != "vjp"))
    assert repr(type(x)) == "<class 'fdtensor.tensors.dtensor.DTensor'>"
