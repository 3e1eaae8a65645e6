"""Programs within a budget of bytes: what they hold, what they give, what they make again."""

import re
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from fdtensor import (
    Layout,
    Mesh,
    Ragged,
    SimulatedComm,
    TensorType,
    TraceError,
    distribute,
    spmd,
    trace,
)
from fdtensor.func import scan
from fdtensor.layouts.tree import flatten
from fdtensor.programs.memory import least_held, lines_of
from fdtensor.programs.program import Program
from fdtensor.programs.rematerialize import fitted
from tests.support.depth import times
from tests.support.programs import CASES, checked, settings_of, traced

MESH = Mesh(dp=4)
any_setting = st.sampled_from(sorted(CASES)).flatmap(lambda name: settings_of(name))


@settings(max_examples=times(5, 200))
@given(any_setting, st.floats(0, 1))
def test_a_program_fits_its_budget_and_gives_the_same_or_says_the_least(setting, part):
    plain = traced(setting)
    budget = int(part * plain.peak_bytes)
    try:
        program = checked(setting, max_bytes=budget)
    except TraceError as error:
        least = told(error)
        assert budget < least <= plain.peak_bytes
        program = traced(setting, max_bytes=least)
        budget = least
    program.verify()
    assert program.peak_bytes <= budget


@settings(max_examples=times(20, 400))
@given(any_setting, st.floats(0, 1))
def test_nothing_holds_less_than_each_of_its_lines_needs(setting, part):
    program = traced(setting)
    lines = lines_of(program, program.busiest_ranks)
    budgets = [int(part * program.peak_bytes), 0]
    for _, peak in fitted(lines, budgets, program.cost):
        assert least_held(lines) <= peak <= program.peak_bytes


def told(error: TraceError) -> int:
    """The least that an error says to do."""
    found = re.search(r"the least that is known to do is (\d+)", str(error))
    assert found is not None, str(error)
    return int(found[1])


def residual(weights, x):
    for up, down in weights:
        x = x + F.gelu(F.layer_norm(x, x.shape[1:]) @ up) @ down
    return (x * x).sum()


def types(layers: int, layout: Layout) -> tuple[list[tuple[TensorType, TensorType]], TensorType]:
    def typed(*shape: int) -> TensorType:
        return TensorType(shape, torch.float32, layout)

    return [(typed(128, 512), typed(512, 128)) for _ in range(layers)], typed(1024, 128)


gradient = torch.func.grad(residual)


@cache
def plainly(layers: int) -> Program:
    """The gradient without a budget."""
    return trace(gradient, *types(layers, MESH.layout("dp")))


@cache
def within(part: float) -> tuple[Program, Program]:
    plain, given_ = plainly(6), types(6, MESH.layout("dp"))
    return plain, trace(gradient, *given_, max_bytes=int(part * plain.peak_bytes))


def ops(program: Program) -> list[str]:
    return [str(eqn.op) for eqn in program.eqns]


def test_cheap_calls_are_made_again_first():
    plain, program = within(0.8)
    assert program.received_bytes == plain.received_bytes
    assert ops(program).count("aten.mm.default") == ops(plain).count("aten.mm.default")
    assert ops(program).count("aten.gelu.default") > ops(plain).count("aten.gelu.default")


def test_layers_are_computed_again_and_weights_gathered_again_where_less_is_left():
    plain, program = within(0.35)
    assert program.peak_bytes <= 0.35 * plain.peak_bytes
    more = ops(program).count("aten.mm.default") - ops(plain).count("aten.mm.default")
    assert 0 < more <= 24  # the forward has 12, some of which run twice
    assert plain.received_bytes < program.received_bytes <= 2 * plain.received_bytes


def test_less_memory_takes_more_seconds():
    programs = [within(part)[1] for part in (1, 0.8, 0.6, 0.4)]
    peaks = [program.peak_bytes for program in programs]
    lines = [len(program.eqns) for program in programs]
    assert peaks == sorted(peaks, reverse=True)
    assert lines == sorted(lines)
    assert all(program.seconds < 1.5 * programs[0].seconds for program in programs)


@pytest.mark.parametrize("part", [0.8, 0.5, 0.35])
def test_results_are_those_without_a_budget_to_the_last_bit(part):
    given_ = types(4, MESH.layout("dp"))
    comm = SimulatedComm(MESH)
    leaves, tree = flatten(given_)
    generator = torch.Generator().manual_seed(0)
    values = tree.unflatten(
        [distribute(torch.randn(t.shape, generator=generator), t.layout, comm) for t in leaves]
    )
    budget = int(part * plainly(4).peak_bytes)
    plain = spmd(gradient, as_if=plainly(4))(*values)
    fits = spmd(gradient, max_bytes=budget)(*values)
    pairs = zip(blocks_of(plain), blocks_of(fits), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def blocks_of(tree: object) -> list[torch.Tensor]:
    return flatten(tree)[0]


def test_a_replicated_value_may_wait_as_a_shard():
    x = TensorType((64, 64), torch.float32, MESH.layout())

    def f(x):
        dear = torch.linalg.matrix_exp(x)  # cheaper gathered than computed again
        y = x
        for _ in range(3):
            y = torch.cumsum(torch.linalg.matrix_exp(y), 0)
        return dear + y.sum()

    plain = trace(f, x, out_layouts=MESH.layout())
    assert plain.received_bytes == 0
    least = plain.peak_bytes
    with pytest.raises(TraceError) as error:
        trace(f, x, out_layouts=MESH.layout(), max_bytes=0)
    assert told(error.value) <= least


def test_what_does_not_fit_is_told_with_the_least_that_does():
    x = TensorType((64, 64), torch.float32, MESH.layout("dp"))
    with pytest.raises(TraceError) as error:
        trace(torch.neg, x, max_bytes=4096)
    assert str(error.value) == TOO_LITTLE
    assert trace(torch.neg, x, max_bytes=8192).peak_bytes == 8192


@pytest.mark.parametrize("value", [-1, 1.5, True, "1 GB"])
def test_a_budget_is_a_number_of_bytes(value):
    x = TensorType((4,), torch.float32, MESH.layout("dp"))
    with pytest.raises(TraceError, match="Write a whole number of bytes"):
        trace(torch.neg, x, max_bytes=value)


def test_a_backward_of_its_own_saves_less_for_it():
    given_ = types(4, MESH.layout("dp"))
    comm = SimulatedComm(MESH)
    leaves, tree = flatten(given_)
    grads = []
    for budget in (None, plainly(4).peak_bytes // 2):
        generator = torch.Generator().manual_seed(0)
        full = [torch.randn(t.shape, generator=generator).requires_grad_() for t in leaves]
        spread = [distribute(x, t.layout, comm) for x, t in zip(full, leaves, strict=True)]
        spmd(residual, max_bytes=budget)(*tree.unflatten(spread)).full().backward()
        grads.append([x.grad for x in full])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_what_a_loop_holds_is_less_where_its_step_is_computed_again():
    """And that is what an error says."""
    w = TensorType((8, 16, 16), torch.float32, MESH.layout())
    x = TensorType((64, 16), torch.float32, MESH.layout("dp"))

    def body(h, w):
        return torch.tanh(torch.tanh(h @ w) @ w.T)

    def again(h, w):
        return checkpoint(body, h, w, use_reentrant=False)

    def gradient_of(step):
        def gradient(w, x):
            w = w.detach().requires_grad_()
            scan(lambda h, w: (step(h, w), None), x, w)[0].sum().backward()
            return w.grad

        return gradient

    least = trace(gradient_of(again), w, x).peak_bytes
    with pytest.raises(TraceError, match=r"checkpoint in the step of fd\.scan"):
        trace(gradient_of(body), w, x, max_bytes=least)
    assert trace(gradient_of(again), w, x, max_bytes=least).peak_bytes <= least


TOO_LITTLE = """\
neg does not fit in 4096 bytes per rank: the least that is known to do is 8192.

  inputs: 4096 bytes per rank

Cut the inputs over more ranks, or write max_bytes=8192."""


def test_no_program_holds_more_than_its_budget_after_lines_are_merged():
    """An exchange that nobody reads any more, merged with a later one, would keep its message."""

    def f(x, u, d):
        def loss(params):
            u, d = params
            return (x + (x @ u).relu() @ d).clamp(-20, 20).sum()

        return torch.func.grad_and_value(loss)((u, d))

    mesh = Mesh(b=2)
    ragged = Layout(mesh, (Ragged(1, (48, 16)),))
    shapes, layouts = ((64, 64), (64, 96), (96, 64)), (ragged, *[mesh.layout("b")] * 2)
    types = [TensorType(s, torch.float64, at) for s, at in zip(shapes, layouts)]
    assert trace(f, *types).peak_bytes > 325795
    assert trace(f, *types, max_bytes=325795).peak_bytes <= 325795


def test_what_torch_copies_to_view_and_what_run_copies_to_give_counts():
    """A reshape of a transposed block, and a result in the memory of an input, are copies."""
    mesh = Mesh(b=2)
    x = TensorType((8, 12), torch.float32, mesh.layout("b"))
    block = 4 * 12 * 4

    def heads(x):
        y = x * 2
        return y.reshape(8, 6, 2).transpose(0, 1).flatten(1).sum(0), y.amax(-1)

    merged = trace(heads, x)
    assert merged.peak_bytes == 3 * block + block // 6  # the input, y, its copy and its sum
    assert trace(lambda x: (x.T, x[:, :3]), x).peak_bytes == 2 * block + block // 4
    product = trace(
        lambda x, w: (x.unflatten(1, (2, 6)) @ w).relu(),
        x,
        TensorType((6, 6), torch.float32, mesh.layout()),
    )
    assert product.peak_bytes == 36 * 4 + 3 * block  # the view of a product is no copy


def test_what_nobody_reads_any_more_does_not_run():
    """Values that are made again leave lines that nothing reads, whose messages would be sent."""
    mesh = Mesh(x=2)
    f = torch.func.grad(lambda h: (h @ (h.T @ h)).sum())
    type = TensorType((64, 32), torch.float64, mesh.layout(None, "x"))
    program = trace(f, type, max_bytes=43008)
    assert program.peak_bytes <= 43008
    read = {v for eqn in program.eqns for v in eqn.ins} | {*program.outs}
    assert all(read & {*eqn.outs} for eqn in program.eqns if eqn.outs)
    x = torch.randint(-3, 4, (64, 32)).double()
    given = distribute(x, type.layout, SimulatedComm(mesh))
    assert torch.equal(spmd(f, max_bytes=43008)(given).full(), f(x))
