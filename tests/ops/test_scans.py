"""`scan` in traced functions: lines of a step once, with all derivatives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._higher_order_ops.scan import scan as torch_scan
from torch.utils.checkpoint import checkpoint

import fdtensor as fd
from fdtensor import Mesh, Program, SimulatedComm, TensorType, distribute, spmd, trace
from fdtensor.errors import FallbackWarning, IndexRangeError, TraceError
from fdtensor.layouts.tree import flatten
from fdtensor.ops.decompositions.control_flow import MANY
from fdtensor.ops.line_checks import debug
from fdtensor.programs.loops import loops_of
from fdtensor.random import key
from fdtensor.testing.strategies import layouts, meshes
from tests.ops.test_loops import eager, results

MESH = Mesh(x=2, y=2)
COMM = SimulatedComm(MESH)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


W, XS, V = drawn(4, 4) / 2, drawn(5, 4, seed=1), drawn(4, seed=2)


def recurrent(w, xs, v):
    """A carry, stacked results and what all steps read."""
    c, ys = fd.scan(lambda c, x: (torch.tanh(c @ w + x * v), (c * x).sum() + c), v * 0, xs)
    return (c * c).sum() + (ys**3).sum()


def backwards(w, xs, v):
    """From the last entry on, with no carry of floats."""
    i, ys = fd.scan(lambda i, x: (i + 1, x.cumsum(0) * i @ w), torch.tensor(1), xs, reverse=True)
    return (ys * v).sum() * i


def nested(w, xs, v):
    """A scan in each step of a scan, by views of what is around."""

    def outer(c, x):
        c, ys = fd.scan(lambda d, u: (torch.sin(d @ w.T + u * c), d.clone()), c, xs * x)
        return c, ys.sum(0)

    c, ys = fd.scan(outer, v, xs[:3])
    return c.sum() + (ys * ys).sum()


def branching(w, xs, v):
    """A branch in each step, and a scan in a branch."""

    def step(c, x):
        c = torch.cond(x.sum() > 0, lambda: torch.tanh(c @ w), lambda: c * v)
        return c, c.sum()

    c, ys = fd.scan(step, v, xs)
    c = torch.cond(
        c.sum() > 0, lambda: fd.scan(lambda d, x: (d * x.cos(), None), c, xs)[0], lambda: c @ w
    )
    return (c * c).sum() + ys.sum()


def pytrees(w, xs, v):
    """Pytrees of carries, entries and results, integers among them."""

    def step(carry, entry):
        (a, n), (u, k) = carry["a"], entry
        return {"a": (a * u + w[0], n + k)}, (a.sum(), [n * 2])

    end, (sums, (twice,)) = fd.scan(step, {"a": (v, 3)}, (xs, torch.arange(5)))
    a, n = end["a"]
    return (a * sums.sum()).sum() + twice.sum() * n * v.sum()


def powers(w, xs, v):
    """No entries at all."""
    return (fd.scan(lambda c, _: (c @ w, None), v, length=4)[0] * xs).sum()


def of_torch(w, xs, v):
    """The function of torch, from the end along another dim."""
    c, ys = torch_scan(
        lambda c, x: (c * x.sin() + w.sum(), c * 1), xs.sum(1) * v[0], xs, dim=1, reverse=True
    )
    return (c * ys.sum(1)).sum()


def of_torch_plainly(w, xs, v):
    c, ys = fd.scan(
        lambda c, x: (c * x.sin() + w.sum(), c * 1), xs.sum(1) * v[0], xs.T, reverse=True
    )
    return (c * ys.sum(0)).sum()


CASES = recurrent, backwards, nested, branching, pytrees, powers, of_torch
PLAINLY = {of_torch: of_torch_plainly}

by = torch.func
WAYS = {
    "value": lambda f: f,
    "grad": lambda f: by.grad(f, (0, 1, 2)),
    "vmap": lambda f: lambda w, xs, v: by.vmap(f, (None, None, 0))(w, xs, torch.stack([v, 2 * v])),
    "each grad": lambda f: (
        lambda w, xs, v: by.vmap(by.grad(f), (0, None, None))(torch.stack([w, w.T]), xs, v)
    ),
    "jvp": lambda f: lambda w, xs, v: by.jvp(f, (w, xs, v), (w.T, xs * 2, v + 1)),
    "twice": lambda f: by.grad(lambda w, xs, v: by.grad(f, 2)(w, xs, v).square().sum(), (0, 1)),
    "curvature": lambda f: (
        lambda w, xs, v: by.jvp(lambda v: by.grad(f, 2)(w, xs, v), (v,), (v.cos(),))
    ),
}


@st.composite
def operands(draw):
    mesh = draw(meshes(max_axes=2, max_ranks=6))
    partial = ("sum",)
    return mesh, [draw(layouts(mesh, t.shape, partial=partial)) for t in (W, XS, V)]


def plainly(f):
    return PLAINLY.get(f, f)


def each(f, dims):
    """What `vmap` means, for functions with branches of Python."""

    def one(*args):
        count = next(len(a) for a, d in zip(args, dims, strict=True) if d == 0)
        some = [
            [a if d is None else a[i] for a, d in zip(args, dims, strict=True)]
            for i in range(count)
        ]
        return torch.stack([f(*args) for args in some])

    return one


@pytest.mark.few(14)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", CASES)
@given(given=operands())
@settings(max_examples=2)
def test_a_scan_gives_what_python_gives_in_all_transforms(f, way, given):
    mesh, types = given
    comm = SimulatedComm(mesh)
    args = [distribute(t, layout, comm) for t, layout in zip((W, XS, V), types, strict=True)]
    step = spmd(WAYS[way](f))
    vmap, by.vmap = by.vmap, each
    try:
        due = eager(lambda _, w, xs: WAYS[way](plainly(f))(w, xs, V), W, XS)
    finally:
        by.vmap = vmap
    for out, plain in zip(results(step(*args)), due, strict=True):
        torch.testing.assert_close(out, torch.as_tensor(plain), rtol=1e-9, atol=1e-9)
    program = step.trace(*args)
    program.verify()
    assert Program.from_json(program.to_json()).digest == program.digest


@pytest.mark.parametrize("f", CASES)
def test_backward_reads_what_the_forward_has_kept(f):
    held = [t.clone().requires_grad_() for t in (W, XS, V)]
    known = [t.clone().requires_grad_() for t in (W, XS, V)]
    args = [distribute(t, MESH.layout("x", *["y"][: t.ndim - 1]), COMM) for t in held]
    with debug():
        spmd(f)(*args).full().backward()
    cond, torch.cond = torch.cond, lambda p, f, g: f() if p else g()
    try:
        plainly(f)(*known).backward()
    finally:
        torch.cond = cond
    for own, due in zip(held, known, strict=True):
        torch.testing.assert_close(own.grad, due.grad, rtol=1e-9, atol=1e-9)


# --- programs --------------------------------------------------------------------------------


def layer(h, p):
    return h + torch.tanh(h @ p["up"]) @ p["down"], None


def stacked(count, mesh=MESH, width=64):
    shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
    return {
        k: TensorType((count, *shape), torch.float32, mesh.layout(None, None, "x"))
        for k, shape in shapes.items()
    }


def deep(params, x):
    return fd.scan(layer, x, params)[0].square().mean()


def test_a_program_of_many_layers_has_the_lines_of_one():
    x = TensorType((256, 64), torch.float32, MESH.layout("y"))
    two, many = (trace(torch.func.grad(deep), stacked(n), x) for n in (2, 96))
    assert abs(len(two.eqns) - len(many.eqns)) < 10
    assert [loop.steps for loop in loops_of(many)] == [96, 96]


def test_bytes_and_seconds_count_all_steps():
    x = TensorType((512, 64), torch.float32, MESH.layout("y"))
    few, many = (trace(deep, stacked(n), x, choice="follow") for n in (4, 8))
    for program, count in ((few, 4), (many, 8)):
        (loop,) = loops_of(program)
        of_step = received(program.eqns[loop.start : loop.stop])
        assert of_step > 0
        assert program.received_bytes_at(0) == received(program.eqns) + (count - 1) * of_step
        assert program.received_bytes == program.received_bytes_at(0)
        assert str(program).count("in each step") == 0
    assert few.seconds < many.seconds < 2 * few.seconds


def received(eqns):
    steps = [step for eqn in eqns if eqn.is_collective for step in eqn.steps]
    return sum(step.collective.received_at(step, 0) for step in steps)


def test_the_backward_computes_no_product_of_the_forward_again():
    x = TensorType((256, 64), torch.float32, MESH.layout("y"))
    products = ("mm", "bmm")

    def count(f):
        program = trace(f, stacked(6), x)
        return sum(str(eqn.op).split(".")[1] in products for eqn in program.eqns if not eqn.steps)

    assert count(deep) == 2
    assert count(torch.func.grad(deep, (0, 1))) == 6


def test_a_checkpoint_in_a_step_keeps_less_and_computes_again():
    def again(params, x):
        step = lambda h, p: checkpoint(layer, h, p, use_reentrant=False)  # noqa: E731
        return fd.scan(step, x, params)[0].square().mean()

    mesh = Mesh(x=2)
    x = torch.randn(512, 32, requires_grad=True)
    comm = SimulatedComm(mesh)
    own = {k: torch.randn(16, *s) / 8 for k, s in {"up": (32, 128), "down": (128, 32)}.items()}
    params = {k: distribute(t, mesh.layout(), comm) for k, t in own.items()}
    there = distribute(x, mesh.layout("x"), comm)
    peaks, grads = [], []
    for f in (deep, again):
        step = spmd(f)
        x.grad = None
        step(params, there).full().backward()
        grads.append(x.grad)
        peaks.append(step.trace_backward(params, there).peak_bytes)
    torch.testing.assert_close(*grads)
    assert peaks[1] < 0.6 * peaks[0]


def test_stacks_are_written_in_place():
    mesh = Mesh(x=2)
    xs = TensorType((64, 1024), torch.float32, mesh.layout(None, "x"))
    program = trace(lambda xs: fd.scan(lambda c, x: (c + x, c * x), xs[0], xs)[1], xs)
    assert program.peak_bytes < 3.2 * 64 * 1024 * 4 / 2


def test_a_large_size_of_a_loop_is_reduced_after_it():
    """The gradient of what all steps read adds up pending, and is reduced once."""
    x = TensorType((8, 4096, 1024), torch.float32, MESH.layout(None, "x"))
    w = TensorType((1024, 1024), torch.float32, MESH.layout())

    def loss(w, xs):
        return fd.scan(lambda c, x: (c + (x @ w).tanh().sum(), None), torch.zeros(()), xs)[0]

    program = trace(torch.func.grad(loss), w, x, out_layouts=MESH.layout())
    large = [
        i for i, e in enumerate(program.eqns) if e.is_collective and e.steps[0].src.numel > 2**16
    ]
    assert large
    assert min(large) >= max(loop.stop for loop in loops_of(program))


def test_faults_of_all_steps_are_counted():
    table, index = drawn(4), torch.tensor([[0, 1], [2, 5], [-7, 3]])
    args = [distribute(t, MESH.layout("x"), COMM) for t in (table, index)]

    def total(table, index):
        return fd.scan(lambda c, i: (c + table[i].sum(), None), table[0] * 0, index)[0]

    f = spmd(total)
    with pytest.raises(IndexRangeError, match=r"2 entries where it must not be: index of index"):
        f(*args)
    inside = distribute(index.clamp(0, 3), MESH.layout("x"), COMM)
    due = sum(table[i].sum() for i in index.clamp(0, 3))
    assert f(args[0], inside).item() == pytest.approx(due.item(), rel=1e-5)


def test_parameters_of_a_module_around_have_gradients():
    model = torch.nn.Linear(4, 4, dtype=torch.float64)

    def loss(params, xs):
        cell = lambda h, x: (torch.func.functional_call(model, params, (h + x,)).tanh(), h)  # noqa: E731
        h, ys = fd.scan(cell, torch.zeros(4, dtype=torch.float64), xs)
        return (h + ys).sum()

    own = {k: p.detach() for k, p in model.named_parameters()}
    params = {k: distribute(p, MESH.layout("x"), COMM) for k, p in own.items()}
    out = spmd(torch.func.grad(loss))(params, distribute(XS, MESH.layout(None, "y"), COMM))
    due = torch.func.grad(loss)(own, XS)
    for name, grad in out.items():
        torch.testing.assert_close(grad.full(), due[name])


def test_dropout_has_other_numbers_in_each_step():
    xs = distribute(torch.ones(6, 512), MESH.layout(None, "x"), COMM)
    f = spmd(lambda xs: fd.scan(lambda c, x: (c + 1, torch.dropout(x, 0.5, True)), 0, xs)[1])
    out = f(xs, key=key(3)).full()
    assert len({tuple(row.tolist()) for row in out}) == 6
    wide = distribute(torch.ones(MANY, 2), MESH.layout(), COMM)
    with pytest.warns(FallbackWarning, match=f"draws random numbers has {MANY} steps"):
        f(wide, key=key(3))


# --- what a step reads of around, when it runs again for its derivative ------------------------


def test_autocast_and_regions_around_a_scan_count_in_its_backward():
    w, xs = W.float(), XS.float()
    args = [distribute(t, MESH.layout(), COMM) for t in (w, xs)]

    def cast(w, xs):
        with torch.autocast("cpu", torch.bfloat16):
            return fd.scan(lambda h, x: ((h @ w).float() + x, None), xs[0] * 0, xs)[0].sum()

    def pinned(w, xs):
        with fd.region(MESH.layout(None, "y")):
            return fd.scan(lambda h, x: (torch.tanh(h @ w), None), w * 0 + 1, xs)[0].sum()

    program = spmd(torch.func.grad(cast)).trace(*args)
    products = [eqn for eqn in program.eqns if str(eqn.op) == "aten.mm.default"]
    assert len(products) == 3
    assert {program.type_of(eqn.outs[0]).dtype for eqn in products} == {torch.bfloat16}
    program = spmd(torch.func.grad(pinned)).trace(*args)
    assert sum(str(eqn.op) == "aten.tanh.default" for eqn in program.eqns) == 1


class Squared(torch.autograd.Function):
    """A square whose derivative is another one, to be seen."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0] * 3


def with_a_derivative_of_its_own(w, xs, v):
    return fd.scan(lambda h, x: (Squared.apply(h @ w).tanh() + x, None), v, xs)[0].sum()


def in_place(w, xs, v):
    def step(h, x):
        h = h.clone()
        h.add_(1)
        y = torch.empty_like(h)
        y.copy_(h @ w)
        y[0] = 0
        return y.tanh_() * x, h.sum()

    h, sums = fd.scan(step, v, xs)
    return h.sum() + sums.sum()


@pytest.mark.parametrize("f", [with_a_derivative_of_its_own, in_place])
def test_steps_with_functions_of_their_own_and_writes(f):
    args = [distribute(t, MESH.layout("x"), COMM) for t in (W, XS, V)]
    grads = spmd(torch.func.grad(f, (0, 1, 2)))(*args)
    for grad, due in zip(grads, torch.func.grad(f, (0, 1, 2))(W, XS, V), strict=True):
        torch.testing.assert_close(grad.full(), due)


def test_an_object_that_changes_before_the_derivative_is_told():
    class Cell:
        scale = None

    cell = Cell()

    def loss(w, xs):
        cell.scale = w.sum(0)
        h, _ = fd.scan(lambda h, x: (torch.tanh(h * cell.scale + x), None), xs[0], xs)
        cell.scale = h
        return (h * cell.scale).sum()

    args = [distribute(t, MESH.layout("x"), COMM) for t in (W, XS)]
    with pytest.raises(TraceError, match="reads other tensors when it is differentiated"):
        spmd(torch.func.grad(loss))(*args)


def test_in_shard_map():
    """Each step has lines of its own there: its collectives are of the ranks around."""
    mesh = Mesh(x=2)
    cut, comm = mesh.layout("x"), SimulatedComm(mesh)

    def inner(x, w):
        def step(h, row):
            h = torch.tanh(fd.psum(h @ w, "x") + row * fd.axis_index("x"))
            return h, fd.psum(row.sum(), "x") * h

        h, ys = fd.scan(step, x.sum(0) * 0, x)
        return (h.sum() + ys.sum()).reshape(1)

    def f(x, w):
        whole = mesh.layout()
        return fd.shard_map(inner, mesh=mesh, in_layouts=(cut, whole), out_layouts=cut)(x, w)

    x, w = distribute(XS[:4], cut, comm), distribute(W, mesh.layout(), comm)
    torch.testing.assert_close(spmd(f)(x, w).full(), f(x, w).full())
    loss = lambda x, w: f(x, w).sum()  # noqa: E731
    inside, outside = spmd(torch.func.grad(loss))(x, w), fd.grad(loss)(x, w)
    torch.testing.assert_close(inside.full(), outside.full())


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_in_the_stages_of_a_pipeline(schedule):
    meshes = [Mesh.from_ranks(ranks, "dp") for ranks in ([0, 1], [2, 3])]
    comm = SimulatedComm(Mesh(all=4))
    own, x, target = [drawn(3, 4, 4) / 2, drawn(3, 4, 4, seed=5) / 2], drawn(8, 4), drawn(8, 4)
    params = [distribute(t, mesh.layout(), comm) for t, mesh in zip(own, meshes, strict=True)]
    ends = [distribute(t, m.layout("dp"), comm) for t, m in zip((x, target), meshes, strict=True)]
    stage = lambda w, x: fd.scan(lambda h, w: (torch.tanh(h @ w), None), x, w)[0]  # noqa: E731
    loss = torch.nn.functional.mse_loss
    step = fd.parallel.pipeline(
        [stage, stage], loss, meshes=meshes, microbatches=4, schedule=schedule
    )
    grads, value = step(params, *ends)
    whole = torch.func.grad_and_value(lambda p: loss(stage(p[1], stage(p[0], x)), target))
    due, known = whole(own)
    torch.testing.assert_close(value.full(), known)
    for grad, plain in zip(grads, due, strict=True):
        torch.testing.assert_close(grad.full(), plain)


def test_sizes_that_are_not_known():
    weights = distribute(torch.stack([W, W.T]), MESH.layout(None, "x"), COMM)
    loss = lambda w, x: fd.scan(lambda h, w: (torch.tanh(h @ w), None), x, w)[0].sum()  # noqa: E731
    step = spmd(torch.func.grad(loss), dynamic={"x": 0})
    for count in (2, 6, 8):
        rows = drawn(count, 4, seed=count)
        out = step(weights, distribute(rows, MESH.layout("y"), COMM)).full()
        torch.testing.assert_close(out, torch.func.grad(loss)(torch.stack([W, W.T]), rows))


# --- manners ---------------------------------------------------------------------------------


def test_outside_of_traced_functions():
    carry, ys = fd.scan(lambda c, x: (c + x, (c, x * 2)), torch.zeros(4).double(), XS)
    torch.testing.assert_close(carry, XS.sum(0))
    torch.testing.assert_close(ys[1], XS * 2)
    there = distribute(XS, MESH.layout("x"), COMM)
    carry, ys = fd.scan(lambda c, x: (c + x.sum(), None), there.sum() * 0, there)
    assert ys is None
    assert carry.item() == pytest.approx(XS.sum().item(), rel=1e-5)


def test_a_scan_over_no_entries():
    none = distribute(torch.zeros(0, 4), MESH.layout(None, "x"), COMM)
    f = spmd(lambda xs: fd.scan(lambda c, x: (c + x.sum(), x * 2), torch.ones(3), xs))
    carry, ys = f(none)
    assert carry.full().tolist() == [1, 1, 1]
    assert ys.full().shape == (0, 4)
    carry, ys = fd.scan(lambda c, x: (c + x.sum(), x * 2), torch.ones(3), torch.zeros(0, 4))
    assert carry.tolist() == [1, 1, 1]
    assert ys.shape == (0, 4)


def test_a_carry_keeps_its_type_where_steps_have_lines_of_their_own():
    step = lambda c, x: (c.float() + torch.rand_like(x).float(), None)  # noqa: E731
    with pytest.raises(TraceError, match="gives carry 0 another type"):
        fd.scan(step, XS[0], XS)
    with pytest.raises(TraceError, match="gives carry 0 another type"):
        spmd(lambda x: fd.scan(step, x[0], x))(distribute(XS, MESH.layout(), COMM), key=key(0))
    with pytest.raises(TraceError, match="scan carries 'a', which is no tensor and no number"):
        fd.scan(lambda c, x: (c, None), "a", XS)


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda x: fd.scan(lambda c, x: (c.float(), None), x[0], x), "gives carry 0 another type"),
        (lambda x: fd.scan(lambda c, x: (c[:2], None), x[0], x), "gives carry 0 another type"),
        (lambda x: fd.scan(lambda c, x: c + x, x[0], x), "no pair of a carry and a result"),
        (lambda x: fd.scan(lambda c, x: ((c, c), None), x[0], x), "another structure of carry"),
        (lambda x: fd.scan(lambda c, x: (c, None), x[0], x, 4), "other numbers of entries"),
        (lambda x: fd.scan(lambda c, x: (c, None), x[0]), "no xs and no length"),
        (lambda x: fd.scan(lambda c, x: (c, None), x[0], {"a": x.sum()}), r"xs\['a'\] of scan is"),
        (lambda x: fd.scan(lambda c, _: (x.add_(1)[0], None), x[0], x), "writes by add_ to a"),
    ],
)
def test_what_no_scan_can_do_is_refused(f, text):
    with pytest.raises(TraceError, match=text):
        spmd(f)(distribute(XS, MESH.layout("x"), COMM))


def test_results_of_a_step_may_come_from_around():
    """Or be an entry itself, or what was carried."""
    f = lambda xs, w: fd.scan(lambda c, x: (x, (w, x, c)), xs[0] * 0, xs)  # noqa: E731
    args = [distribute(t, MESH.layout("x"), COMM) for t in (XS, W)]
    for out, due in zip(results(spmd(f)(*args)), flatten(f(XS, W))[0], strict=True):
        torch.testing.assert_close(out, due)
