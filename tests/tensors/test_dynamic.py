"""`spmd(f, dynamic=...)` gives at any sizes what the plain function does, recorded few times."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor.layouts.errors import FallbackWarning, TraceError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Ragged, Spans
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten
from fdtensor.random import key
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.spmd import spmd
from tests.support.programs import CASES, SMOOTH, close, derivatives, settings_of, tensors_of

MESH = Mesh(dp=2, tp=2)
COMM = SimulatedComm(MESH)
SIZED = [name for name, case in CASES.items() if case.names]
ONCE = [name for name in SMOOTH if name in SIZED and name != "attention"]
"""The cases of which torch has another derivative: one of attention takes one already."""
LONG = "group_norm", "layer_norm"
"""The functions of which a second derivative is hundreds of steps; tests of one size take it."""

few = settings(max_examples=settings.default.max_examples // 3)
some = settings(max_examples=settings.default.max_examples // 2)


def recordings(step) -> int:
    return sum(len(family.forward) for family in step.families.values())


@st.composite
def calls(draw, names, partial=("sum", "avg", "max", "min")):
    """A setting, the dims of which some sizes are not known, and the sizes of several calls."""
    setting = draw(settings_of(draw(st.sampled_from(names)), max_size=5, partial=partial))
    case = setting.case
    letters = draw(st.sets(st.sampled_from(case.names), min_size=1))
    shapes = [text.strip().partition("<")[0].strip("?").split() for text in case.takes.split(",")]
    for shape, layout in zip(shapes, setting.layouts, strict=True):
        letters -= {shape[p.dim] for p in layout.placements if isinstance(p, (Ragged, Spans))}
    dims = {
        i: tuple([d for d, letter in enumerate(shape) if letter in letters])
        for i, shape in enumerate(shapes)
    }
    several = [setting.sizes]
    for _ in range(draw(st.integers(1, 3))):
        least = {a: max(case.least, a in case.indexed) for a in letters}
        more = {a: draw(st.integers(least[a], 7)) for a in letters}
        several.append({**setting.sizes, **more})
    return setting, dims, several


def results(out) -> list[torch.Tensor]:
    leaves = flatten(out, is_leaf=lambda x: isinstance(x, DTensor))[0]
    return [t.full() if isinstance(t, DTensor) else t for t in leaves]


def plain_results(out) -> list[torch.Tensor]:
    return [t for t in flatten(out)[0] if isinstance(t, torch.Tensor)]


@some
@given(calls(SIZED))
def test_any_sizes_give_what_the_plain_function_gives(drawn):
    setting, dims, several = drawn
    comm = SimulatedComm(setting.mesh, cost=setting.cost)
    step = spmd(setting.case.f, dynamic=dims)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for sizes in several:
            full = tensors_of(setting.case, sizes)
            args = [distribute(t, at, comm) for t, at in zip(full, setting.layouts)]
            close(results(step(*args)), plain_results(setting.case.f(*full)))


@few
@given(calls(ONCE, ("sum", "avg")), st.booleans())
def test_and_the_same_derivatives(drawn, twice):
    setting, dims, several = drawn
    twice = twice and setting.case.f.__name__ not in LONG
    comm = SimulatedComm(setting.mesh, cost=setting.cost)
    step = spmd(setting.case.f, dynamic=dims)

    def spread(*leaves):
        args = [distribute(t, at, comm) for t, at in zip(leaves, setting.layouts)]
        return results(step(*args))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for sizes in several:
            full = tensors_of(setting.case, sizes)
            leaves = [[t.clone().requires_grad_() for t in full] for _ in range(2)]
            due = derivatives(lambda *x: plain_results(setting.case.f(*x)), leaves[1], twice)
            derived = derivatives(spread, leaves[0], twice)
            torch.testing.assert_close(derived, due, rtol=1e-6, atol=1e-6, equal_nan=True)


class Step:
    """A function that counts how often it runs."""

    def __init__(self, f):
        self.f, self.runs = f, 0

    def __call__(self, x, *others):
        self.runs += 1
        return self.f(x, *others)


def spread(x, *axes):
    return distribute(x, MESH.layout(*axes), COMM)


def numbers(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) % 7 - 3


W = numbers(4, 6)


def test_a_function_runs_once_for_all_sizes():
    f = Step(lambda x, w: torch.relu(x @ w).sum(1) / x.shape[0])
    step = spmd(f, dynamic={"x": 0})
    w, places = spread(W, None, "tp"), set()
    for size in (8, 6, 7, 3, 2, 12, 8):
        x = numbers(size, 4)
        out = step(spread(x, "dp"), w)
        torch.testing.assert_close(out.full(), f.f(x, W))
        places.add(out.layout)
    assert f.runs == 1
    assert len(places) == 1
    assert step(spread(numbers(1, 4), "dp"), w).shape == (1,)
    assert f.runs == 2, "a single row may be broadcast, and is another function"
    assert step.trace(spread(numbers(8, 4), "dp"), w) is step.trace(spread(numbers(8, 4), "dp"), w)


def test_and_once_more_for_the_derivative():
    f = Step(lambda x, w: torch.relu(x @ w).square().sum())
    step = spmd(f, dynamic={"x": 0})
    for size in (8, 6, 3):
        full, x = W.clone().requires_grad_(), numbers(size, 4)
        w = distribute(W.clone(), MESH.layout(None, "tp"), COMM).requires_grad_()
        step(spread(x, "dp"), w).backward()
        f.f(x, full).backward()
        torch.testing.assert_close(w.grad.full(), full.grad)
    assert f.runs == 2


def test_a_branch_on_a_size_is_recorded_on_both_sides():
    f = Step(lambda x: x * 2 if x.shape[0] > 4 else x + 1)
    step = spmd(f, dynamic={"x": 0})
    for size in (8, 3, 5, 4, 7, 2):
        x = numbers(size, 4)
        assert torch.equal(step(spread(x, "dp")).full(), f.f(x))
    assert f.runs == recordings(step) == 2


def test_one_size_may_be_another_by_chance():
    """Two sizes that are equal at first, and are not later."""
    step = spmd(lambda x, y: (x.sum() * y.sum(), x.shape[0] - y.shape[0]), dynamic={"x": 0, "y": 0})
    for sizes in ((4, 4), (6, 6), (6, 4), (3, 8), (5, 5)):
        x, y = numbers(sizes[0], 4), numbers(sizes[1])
        out, difference = step(spread(x, "dp"), spread(y, "tp"))
        assert torch.equal(out.full(), x.sum() * y.sum())
        assert difference == sizes[0] - sizes[1]
    assert recordings(step) == 2


@pytest.mark.parametrize("sizes", [(5, 2, 0), (0, 5)])
@pytest.mark.parametrize("layout", [("x",), (None, "x"), ()])
def test_a_size_may_be_none(sizes, layout):
    def product(x, y):
        return torch.einsum("id,jd->ij", x, y)

    mesh, step = Mesh(x=2), spmd(product, dynamic={"x": 0})
    comm = SimulatedComm(mesh)
    for n in sizes:
        x, y = torch.ones(n, 4), torch.ones(5, 4)
        args = distribute(x, mesh.layout(*layout), comm), distribute(y, mesh.layout(), comm)
        assert torch.equal(step(*args).full(), product(x, y))


def test_a_loop_over_a_size_is_told_once():
    def total(x):
        return sum(x[i] * i for i in range(x.shape[0]))

    step = spmd(total, dynamic={"x": 0})
    told = r"total is recorded again for each size, since test_dynamic.py:\d+ asks which number x"
    with pytest.warns(FallbackWarning, match=told):
        step(spread(numbers(5, 4), "dp"))
    for size in (5, 3, 4, 3):
        x = numbers(size, 4)
        assert torch.equal(step(spread(x, "dp")).full(), total(x))
    assert recordings(step) == 3


def test_what_takes_no_symbol_is_told_and_recorded_at_each_size():
    def built(x):
        if not isinstance(x.shape[0], int):
            raise TypeError("sizes are numbers")
        return x * x.shape[0]

    step = spmd(built, dynamic={"x": 0})
    told = "built is recorded again for each size, since it does not take a symbol for one: "
    with pytest.warns(FallbackWarning, match=told):
        step(spread(numbers(5, 4), "dp"))
    for size in (5, 3):
        x = numbers(size, 4)
        assert torch.equal(step(spread(x, "dp")).full(), built(x))


def test_what_it_closes_over_is_read_afresh():
    held = spread(W, None, "tp")

    def f(x):
        return x @ held

    step = spmd(f, dynamic={"x": 0})
    for k, size in enumerate((8, 6, 5)):
        held = spread(W + k, None, "tp")
        x = numbers(size, 4)
        assert torch.equal(step(spread(x, "dp")).full(), x @ (W + k))
    assert recordings(step) == 1


def test_random_numbers_do_not_depend_on_how_it_was_recorded():
    def noisy(x):
        return torch.nn.functional.dropout(x + torch.rand_like(x), 0.5)

    step, plain = spmd(noisy, dynamic={"x": 0}), spmd(noisy)
    for size in (8, 6, 5):
        x = spread(numbers(size, 4), "dp")
        assert torch.equal(step(x, key=key(3)).full(), plain(x, key=key(3)).full())
    assert recordings(step.keyed) == 1


def test_layouts_for_other_sizes_are_those_of_the_real_ones():
    real = {8: 8192, 6: 6144}
    step = spmd(
        lambda x, w: (x @ w).sum(1),
        dynamic={"x": 0},
        as_if=lambda shape: [real.get(n, n) for n in shape] if shape[1] == 4 else shape,
    )
    for size in (8, 6):
        x = numbers(size, 4)
        assert torch.equal(step(spread(x, "dp"), spread(W)).full(), (x @ W).sum(1))
    assert recordings(step) == 1


def test_memory_is_bounded_at_every_size():
    step = spmd(lambda x: (x @ x.T).sum(1), dynamic={"x": 0}, max_bytes=4096)
    for size in (8, 12, 6):
        x = spread(numbers(size, 4), "dp")
        assert torch.equal(step(x).full(), (x.full() @ x.full().T).sum(1))
        assert step.trace(x).peak_bytes <= 4096
    assert recordings(step) == 1


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ({"y": 0}, "dynamic names argument 'y', which the function does not have."),
        ({3: 0}, "dynamic names argument 3, which the function does not have."),
        ({"x": 2}, "dynamic names dim 2 of argument 0, which has 2."),
        ({"x": "rows"}, "dynamic={'x': 'rows'} is no option."),
        (["x"], "dynamic=['x'] is no option."),
        ({"x": True}, "dynamic={'x': True} is no option."),
    ],
)
def test_dims_that_are_none_are_refused(dims, text):
    with pytest.raises(TraceError) as error:
        spmd(lambda x: x, dynamic=dims)(spread(numbers(4, 4), "dp"))
    assert str(error.value).startswith(text)


def test_a_dim_in_given_sizes_is_refused():
    layout = MESH.layout(None, None).placed("dp", Ragged(0, (1, 3)))
    x = DTensor(
        (torch.ones(1, 4), torch.ones(1, 4), torch.ones(3, 4), torch.ones(3, 4)),
        TensorType((4, 4), torch.float32, layout),
        COMM,
    )
    with pytest.raises(TraceError, match="cut in given sizes, so its own size is known"):
        spmd(lambda x: x + 1, dynamic={"x": 0})(x)


def test_an_argument_may_be_left_to_its_default():
    step = spmd(lambda x, mask=None: x if mask is None else x * mask, dynamic={"x": 0, "mask": 0})
    for size in (4, 6):
        x = numbers(size, 4)
        assert torch.equal(step(spread(x, "dp")).full(), x)
        assert torch.equal(step(spread(x, "dp"), spread(x > 0, "dp")).full(), x * (x > 0))
    assert recordings(step) == 2
