"""Tests of ops/ambient.py: what functions read from outside, flipped between calls."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from fdtensor import (
    DTensor,
    SimulatedComm,
    TensorType,
    call,
    connect,
    distribute,
    gradients,
    run,
    spmd,
    trace,
)
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tree import flatten
from fdtensor.testing.pool import GlooPool
from fdtensor.testing.values import gather_full
from tests.support.depth import is_deep

MESH = Mesh(x=2, y=2)


@contextlib.contextmanager
def set_to(get, put, value):
    """A setting of torch at `value`, and back."""
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def plain():
    return contextlib.nullcontext()


SETTINGS = {
    "plain": plain,
    "autocast to bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to f16": lambda: torch.autocast("cpu", torch.float16),
    "no autocast": lambda: torch.autocast("cpu", torch.bfloat16, enabled=False),
    "f64 by default": lambda: set_to(
        torch.get_default_dtype, torch.set_default_dtype, torch.float64
    ),
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "deterministic": lambda: set_to(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "a device by default": lambda: torch.device("cpu"),
    "less precise products": lambda: set_to(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
}
"""The settings that a function may read, each as a context."""


def product(x, w):
    return torch.relu(x @ w).sum(1)


def of_integers(x, w):
    n = (x * 8).long().abs()
    return n / 3, n.sqrt(), (n > 0) / 2, n * 0.5, torch.logsumexp(n, 0), n.pow(0.5)


def fresh(x, w):
    return torch.ones(3) * 0.1 + torch.arange(3) / 7, x + torch.full((6,), 0.1), torch.tensor(0.3)


def asking(x, w):
    """A function whose Python reads the settings."""
    if torch.are_deterministic_algorithms_enabled():
        x = x + 1
    if torch.is_grad_enabled():
        x = x * 2
    if torch.is_autocast_enabled("cpu"):
        x = x + 3
    if torch.get_float32_matmul_precision() == "medium":
        x = x - 5
    return x.to(torch.get_default_dtype())


def losses(x, w):
    return F.cross_entropy(x @ w, torch.arange(4) % 3), F.layer_norm(x, [6]), torch.softmax(x, 1)


FUNCTIONS = [product, of_integers, fresh, asking, losses]


def operands(comm, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, generator=generator, dtype=dtype)
    w = torch.randn(6, 4, generator=generator, dtype=dtype)
    dx = distribute(x, MESH.layout("x", "y"), comm)
    return (x, w), (dx, distribute(w, MESH.layout("y"), comm))


def assert_alike(plainly, spread, close):
    """Values, shapes and dtypes, and the dtypes that types and local tensors have."""
    expected = flatten(plainly)[0]
    results = flatten(spread, is_leaf=lambda node: isinstance(node, DTensor))[0]
    for e, d in zip(expected, results, strict=True):
        assert {t.dtype for t in d.comm.leaves(d.local)} == {d.dtype} == {e.dtype}
        torch.testing.assert_close(d.full(), e, rtol=close, atol=close)


def check_flips(comm, f, names, run):
    """Calls `f` under one setting after the other, on the same operands, and again."""
    tensors, spread = operands(comm)
    for name in names:
        with SETTINGS[name]():
            assert_alike(
                f(*tensors), run(*spread), 3e-2 if "auto" in name or "less" in name else 1e-5
            )


@pytest.mark.one_of("way")
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", ["spmd", "call"])
def test_each_call_runs_under_the_settings_of_its_caller(f, way):
    run = spmd(f) if way == "spmd" else lambda *args: call(f, *args)
    check_flips(SimulatedComm(MESH), f, [*SETTINGS, "plain", *reversed(SETTINGS)], run)


@pytest.mark.parametrize("way", ["spmd", "call"])
def test_a_backward_does_not_read_the_settings_of_who_calls_it(way):
    """It was traced with its forward; plain torch takes gradients so where nothing is cast."""

    def f(x, w):
        return (torch.tanh(x @ w) / (x * 4).long().sum(1, keepdim=True).abs().add(1)).sum()

    tensors, spread = operands(SimulatedComm(MESH))
    leaves = [t.clone().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(f(*leaves), leaves)
    for name in ("autocast to bf16", "f64 by default", "deterministic", "a device by default"):
        given = [d.detach().requires_grad_() for d in spread]
        out = spmd(f)(*given) if way == "spmd" else call(f, *given)
        with SETTINGS[name]():
            out.full().backward()
        for d, e in zip(given, expected):
            torch.testing.assert_close(gradients(d).full(), e)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_program_gives_the_same_under_all_settings(f):
    tensors, spread = operands(SimulatedComm(MESH))
    program = trace(f, *spread)
    expected = flatten(f(*tensors))[0]
    for setting in SETTINGS.values():
        with setting():
            values = run(program, [d.local for d in spread], spread[0].comm)
        for value, e, type in zip(values, expected, program.out_types, strict=True):
            assert {t.dtype for t in value} == {type.dtype} == {e.dtype}
            torch.testing.assert_close(gather_full(value, type), e, rtol=1e-5, atol=1e-5)


def test_a_program_says_the_dtype_that_was_the_default():
    double = TensorType((4,), torch.int64, MESH.layout("x"))
    with SETTINGS["f64 by default"]():
        program = trace(lambda x: (x / 2, torch.ones(3), x.sqrt()), double)
    assert [t.dtype for t in program.out_types] == [torch.float64] * 3
    assert all("f64" in str(t) for t in program.out_types)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_what_rules_ask_of_torch_does_not_depend_on_settings(mode):
    """The taps of an op of windows are asked for once; under other settings they were mixed."""
    sizes = [13, 17] if mode == "linear" else [19, 23]
    x = distribute(torch.arange(6.0).reshape(3, 1, 2), MESH.layout("x"), SimulatedComm(MESH))
    for size, name in zip(sizes, ["f64 by default", "a device by default"]):
        with SETTINGS[name]():
            made = spmd(lambda x, size=size: F.interpolate(x, [size], mode=mode))(x)
        assert made.full().dtype == torch.float32
        torch.testing.assert_close(made.full(), F.interpolate(x.full(), [size], mode=mode))


def flips_on_a_rank(f, names):
    comm = connect(MESH)
    check_flips(comm, f, names, spmd(f))
    check_flips(comm, f, names, lambda *args: call(f, *args))


SOME = ["plain", "autocast to bf16", "f64 by default", "inference", "plain"]
"""Settings of each kind: each of four ranks traces a program for each of them."""


@pytest.mark.few(3)
@pytest.mark.mesh
@pytest.mark.parametrize("f", FUNCTIONS)
def test_real_ranks_run_under_the_settings_of_their_caller(f, pool4: GlooPool):
    names = [*SETTINGS, "plain", *reversed(SETTINGS)] if is_deep() else SOME
    pool4.run(flips_on_a_rank, f, names)
