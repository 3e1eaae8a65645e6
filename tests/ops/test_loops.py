"""`while_loop` in traced functions: what is carried keeps its layout, steps are lines once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._higher_order_ops.while_loop import while_loop

from fdtensor import DTensor, Mesh, Program, SimulatedComm, TensorType, distribute, spmd, trace
from fdtensor.errors import IndexRangeError, TraceError
from fdtensor.layouts.tree import flatten
from fdtensor.ops.line_checks import debug
from fdtensor.programs.loops import loops_of
from fdtensor.random import key
from fdtensor.testing.strategies import layouts, meshes
from tests.support.depth import times

MESH = Mesh(x=2, y=2)
COMM = SimulatedComm(MESH)
A = torch.arange(16.0, dtype=torch.float64).view(4, 4) % 5 - 2
B = torch.arange(16.0, dtype=torch.float64).view(4, 4) % 3 - 1


def plain_loop(condition, step, carried):
    """What `while_loop` means."""
    carried = [torch.tensor(t) if isinstance(t, (int, bool)) else t for t in carried]
    while condition(*carried):
        carried = list(step(*carried))
    return tuple(carried)


def power(loop, a, b):
    """Products until an entry is large, or five of them."""
    i, x = loop(lambda i, x: (i < 5) & (x.abs().max() < 50), lambda i, x: (i + 1, x @ b), (0, a))
    return x.sum(0), i


def swapped(loop, a, b):
    """What is carried changes places."""
    i, x, y = loop(lambda i, x, y: i < 3, lambda i, x, y: (i + 1, y, x + 1), (0, a, b))
    return x, y * 2, i


def nested(loop, a, b):
    """A loop in each step of a loop, which begins anew."""

    def step(i, x):
        _, y = loop(
            lambda j, y: j < i, lambda j, y: (j + 1, y + b.sum(1)), (0, torch.zeros_like(x))
        )
        return i + 1, x + y

    return loop(lambda i, x: i < 4, step, (0, a[0]))


def inner_condition(loop, a, b):
    """A loop that says how long another one runs."""

    def condition(i, x):
        (n,) = loop(lambda n: n < x.shape[0], lambda n: (n + 1,), (0,))
        return i < n

    return loop(condition, lambda i, x: (i + 1, x * b), (0, a))


def with_branches(loop, a, b):
    """A branch in each step, and a loop in a branch, counts where it is taken."""

    def step(i, x):
        x = torch.cond(x.sum() > 0, lambda: x - b.relu(), lambda: x + 2)
        return i + 1, x

    i, x = loop(lambda i, x: i < 6, step, (0, a))
    grown = torch.cond(
        x.sum() > 100,
        lambda: loop(lambda i, y: i < 1000, lambda i, y: (i + 1, y * 2), (0, x))[1],
        lambda: x + 1,
    )
    return grown, i


def accumulated(loop, a, b):
    """A sum that may stay pending until the end."""
    return loop(
        lambda i, s: i < 4,
        lambda i, s: (i + 1, s + (a * (b + i)).sum(0)),
        (0, torch.zeros_like(a[0])),
    )[1]


def never(loop, a, b):
    """A loop without a step."""
    go, x = loop(lambda go, x: go, lambda go, x: (x.sum() > 0, x + 1), (False, a))
    return x, go, b


def descent(loop, a, b):
    """A derivative in each step."""

    def step(i, x):
        return i + 1, x - torch.func.grad(lambda x: ((x @ b - a) ** 2).sum())(x) / 64

    return loop(lambda i, x: i < 3, step, (0, a * 0))[1]


CASES = (*(power, swapped, nested, inner_condition, with_branches, accumulated, never, descent),)


def plainly(f, *args):
    return f(plain_loop, *args)


def by_torch(f, *args):
    return f(while_loop, *args)


def results(out):
    leaves = flatten(out, is_leaf=lambda t: isinstance(t, DTensor))[0]
    return [t.full() if isinstance(t, DTensor) else t for t in leaves]


@st.composite
def operands(draw):
    mesh = draw(meshes(max_axes=2, max_ranks=6))
    return mesh, [draw(layouts(mesh, (4, 4), partial=("sum", "max"))) for _ in range(2)]


def eager(f, a, b):
    """The plain function, `torch.cond` as it is in Python."""
    cond, torch.cond = torch.cond, lambda p, f, g: f() if p else g()
    try:
        return results(plainly(f, a, b))
    finally:
        torch.cond = cond


@pytest.mark.parametrize("f", CASES)
@given(given=operands())
@settings(max_examples=times(5, 100))
def test_a_loop_gives_what_python_gives(f, given):
    mesh, (first, second) = given
    comm = SimulatedComm(mesh)
    args = [distribute(A, first, comm), distribute(B, second, comm)]
    step = spmd(lambda a, b: by_torch(f, a, b))
    for out, due in zip(results(step(*args)), eager(f, A, B), strict=True):
        torch.testing.assert_close(out, torch.as_tensor(due))
    with debug():  # of each line, which is another program for ranks
        close = zip(results(step(*args)), eager(f, A, B), strict=True)
        assert all(torch.allclose(out, torch.as_tensor(due)) for out, due in close)
    program = step.trace(*args)
    program.verify()
    assert Program.from_json(program.to_json()).digest == program.digest


def a_loop(f=lambda x: x + 1, n=3):
    return lambda x: while_loop(lambda i, x: i < n, lambda i, x: (i + 1, f(x)), (0, x))[1]


def on_mesh(t, *axes):
    return distribute(t, MESH.layout(*axes), COMM)


def test_what_is_the_same_in_all_steps_is_computed_and_moved_once():
    wide = TensorType((64, 64), torch.float32, MESH.layout(None, "x"))
    x = TensorType((1024, 64), torch.float32, MESH.layout("y"))
    program = trace(lambda x, w: a_loop(lambda x: torch.tanh(x @ w.T))(x), x, wide)
    (loop,) = loops_of(program)
    inside = program.eqns[loop.start : loop.stop]
    assert program.collectives
    assert not any(eqn.is_collective for eqn in inside)
    assert str(program).endswith("received per rank, those of a while_loop in each step")
    indented = [line for line in str(program).splitlines() if line.startswith("    ")]
    assert len(indented) == len(inside)


def test_a_sum_is_reduced_once_after_the_loop():
    types = [TensorType((4096, 4096), torch.float32, MESH.layout("x")) for _ in range(2)]
    program = trace(lambda a, b: by_torch(accumulated, a, b), *types)
    (loop,) = loops_of(program)
    assert any(eqn.is_collective for eqn in program.eqns[loop.stop :])
    assert not any(eqn.is_collective for eqn in program.eqns[loop.start : loop.stop])


def test_faults_of_all_steps_are_counted():
    table = on_mesh(torch.arange(4.0), "x")
    index = torch.tensor([0, 1, 2, 3])

    def walk(table, index):
        def step(i, at, total):
            return i + 1, at + 1, total + table[at].sum()

        return while_loop(lambda i, at, total: i < 3, step, (0, index, table.sum()))[2]

    with pytest.raises(IndexRangeError, match=r"3 entries where it must not be: index of index"):
        spmd(walk)(table, on_mesh(index, "y"))
    assert spmd(walk)(table, on_mesh(index - 3, "y")).item() == 6 + (1 + 2 + 3) * 3


def test_a_derivative_around_a_loop_that_has_none_in_it():
    def loss(w, x):
        scale = a_loop(lambda s: s * 2)(x.detach().abs().sum())
        return (w * x / scale).sum()

    w = on_mesh(A, "x").requires_grad_()
    full = A.clone().requires_grad_()
    spmd(loss)(w, on_mesh(B, "y")).backward()
    ((full * B) / (B.abs().sum() * 8)).sum().backward()
    torch.testing.assert_close(w.grad.full(), full.grad)


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (torch.func.grad(lambda x: a_loop()(x).sum()), "a derivative is asked for of a while_loop"),
        (torch.vmap(a_loop()), "while_loop stands inside of a vmap"),
        (a_loop(lambda x: x[:2]), "a step of a while_loop gives other types than it took."),
        (a_loop(lambda x: x.int()), "a step of a while_loop gives other types than it took."),
        (lambda x: a_loop(lambda y: y + x.add_(1))(x * 1), "a loop writes by add_ to a tensor"),
        (lambda x: while_loop(lambda x: x > 0, lambda x: (x,), (x,))[0], "the condition of a"),
        (lambda x: while_loop(lambda x: True, lambda x: (x,), (x,))[0], "the condition of a"),
    ],
)
def test_what_no_loop_can_do_is_refused(f, text):
    with pytest.raises(TraceError, match=text):
        spmd(f)(on_mesh(A, "x"))


def test_random_numbers_of_a_step_are_refused():
    with pytest.raises(TraceError, match="draws random numbers, which would be the same in each"):
        spmd(a_loop(lambda x: x + torch.rand_like(x)))(on_mesh(A, "x"), key=key(0))


def test_a_value_of_a_step_does_not_leave_its_loop():
    kept = []

    def f(x):
        def step(i, x):
            kept.append(x + i)
            return i + 1, x

        _, x = while_loop(lambda i, x: i < 2, step, (0, x))
        return x + kept.pop()

    with pytest.raises(TraceError, match="a value of a step of a loop is read outside of it"):
        trace(f, TensorType((4, 4), torch.float32, MESH.layout("x")))


def test_a_derivative_by_a_parameter_is_not_lost_in_silence():
    layer = torch.nn.Linear(4, 4)

    def loss(params, x):
        step = lambda i, x: (i + 1, torch.func.functional_call(layer, params, (x,)))  # noqa: E731
        return while_loop(lambda i, x: i < 2, step, (0, x))[1].sum()

    params = {k: on_mesh(p.detach()) for k, p in layer.named_parameters()}
    with pytest.raises(TraceError, match="a derivative is asked for of a while_loop"):
        spmd(torch.func.grad(loss))(params, on_mesh(A.float(), "x"))
    assert spmd(loss)(params, on_mesh(A.float(), "x")).shape == ()


def test_memory_and_graphs():
    x = TensorType((256, 256), torch.float32, Mesh(x=2).layout("x"))
    program = trace(a_loop(torch.tanh), x)
    block = 256 * 256 * 4 // 2
    assert 3 * block <= program.peak_bytes <= 4 * block + 64
    assert trace(a_loop(torch.tanh), x, max_bytes=program.peak_bytes).digest == program.digest
    with pytest.raises(TraceError, match="does not fit in"):
        trace(a_loop(torch.tanh), x, max_bytes=block)
    with pytest.raises(TraceError, match="a graph has no lines that run again"):
        program.to_fx(0)
