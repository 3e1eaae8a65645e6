"""Tests of `assert_same_on_every_layout`: what holds passes, what does not is made small and told."""
# ruff: noqa: E501

import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fdtensor
from fdtensor import (
    Mesh,
    Partial,
    Replicate,
    Shard,
    TensorType,
    call,
    psum,
    random,
    rule,
    shard_map,
    spmd,
)
from fdtensor.layouts.errors import LayoutError, TraceError
from fdtensor.testing import (
    assert_same_on_every_layout,
    assert_same_on_layouts,
    gather_full,
)
from fdtensor.testing.case import Case
from fdtensor.testing.checker import Checker
from fdtensor.testing.compare import Tolerance
from fdtensor.testing.layout_case import LayoutCase

X = torch.arange(15.0).reshape(5, 3) - 7
Y = torch.tensor([0.3, 1.7, -2.2])
LINE = Mesh(x=2)


def failure(*args, law=assert_same_on_every_layout, **kwargs):
    """The text of the failure that a law finds."""
    with pytest.raises(AssertionError) as raised:
        law(*args, **kwargs)
    return str(raised.value)


def split(text):
    """What a failure tells, and its script."""
    story, _, script = text.partition("\n\nThis script fails the same way:\n\n")
    return story, script


def facts(text):
    """The facts of a failure that were not drawn."""
    return "\n".join(line for line in split(text)[0].split("\n") if "  found as:" not in line)


# --- what holds ------------------------------------------------------------------------------


def mlp(x, params, scale=1):
    return {"out": torch.relu(x @ params["up"]) @ params["down"] * scale, "scale": scale}


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_a_function_of_trees_is_the_same_on_every_layout(dtype):
    drawn = torch.Generator().manual_seed(0)
    up, down = (torch.randn(3, 3, generator=drawn).to(dtype) for _ in range(2))
    f = mlp if not dtype.is_complex else lambda x, params, scale: x @ params["up"] * scale
    params = {"up": up, "down": down}
    rough = {"rtol": 0.1, "atol": 0.5} if dtype is torch.bfloat16 else {}
    assert_same_on_every_layout(f, X.to(dtype), params, scale=2, max_examples=4, **rough)


def test_gradients_are_the_same_on_every_layout():
    weight = torch.ones(3, 4, dtype=torch.float64)
    f = lambda x, w, n: F.layer_norm(x @ w, (4,)).square() * n  # noqa: E731
    ints = torch.arange(5)[:, None]
    assert_same_on_every_layout(f, X.double() / 3, weight, ints, grad=True, max_examples=8)


def test_random_functions_are_the_same_on_every_layout_bit_for_bit():
    def noisy(x):
        return F.dropout(x, 0.5) + torch.rand_like(x), torch.randperm(6)

    exact = {"rtol": 0, "atol": 0, "max_examples": 8}
    assert_same_on_every_layout(noisy, X, key=random.key(3), **exact)
    assert_same_on_every_layout(
        lambda x: noisy(x)[0], X, key=random.key(3), grad=True, max_examples=4
    )


def test_what_depends_on_data_and_python_results_are_compared_too():
    f = lambda x: (x.nonzero(), x.sum().item(), "text", None)  # noqa: E731
    on_replicas = functools.partial(call, f)
    assert_same_on_every_layout(f, X, max_examples=8, spread=on_replicas)
    assert_same_on_every_layout(f, X.long(), max_examples=8, spread=on_replicas)
    assert_same_on_every_layout(torch.clone, torch.tensor([float("nan"), float("inf")]))


def test_floats_are_compared_with_what_their_terms_are():
    x = (torch.arange(20) / 7).bfloat16()
    terms = TensorType((20,), x.dtype, Mesh(x=3).layout(partial={"x": "sum"}))
    spread = LayoutCase([terms]).spread([x])
    meant = gather_full(spread[0].local, terms)
    checker = Checker(Case.of(torch.clone, (x,), {}), Tolerance())
    assert not torch.equal(meant, x)
    assert torch.equal(checker._due(spread).leaves[0], meant)


def test_functions_that_change_their_arguments_leave_those_of_the_caller_alone():
    x = X.clone()
    assert_same_on_every_layout(lambda x: x.add_(1), x, max_examples=4, grad=True)
    assert torch.equal(x, X)


def test_it_runs_inside_of_a_property_test():
    @settings(max_examples=2, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.integers(1, 3))
    def law(n):
        assert_same_on_every_layout(torch.sum, torch.ones(n), max_examples=3)

    law()


# --- which layouts are tried -----------------------------------------------------------------


def tried(*args, **options):
    """The layouts that a function was run under."""
    seen = []

    def record(*args):
        seen.append([x.layout for x in args])
        return spmd(torch.add)(*args)

    assert_same_on_every_layout(torch.add, *args, spread=record, **options)
    return seen


def test_a_seed_draws_the_same_layouts_again():
    some, again, others = (tried(X, Y, max_examples=6, seed=seed) for seed in (1, 1, 2))
    assert some == again != others
    assert len(some) == 6
    assert len({str(layouts) for layouts in some}) == 6


def test_layouts_are_of_every_kind():
    kinds = {
        type(p)
        for seen in tried(X, Y, max_examples=15)
        for layout in seen
        for p in layout.placements
    }
    assert {kind.__name__ for kind in kinds} >= {"Replicate", "Shard", "Partial", "Ragged"}


def test_options_pin_the_mesh_the_ranks_and_what_is_pending():
    for layouts in tried(X, Y, mesh=LINE, partial=False, max_examples=6):
        assert {layout.mesh for layout in layouts} == {LINE}
        assert not any(layout.partial for layout in layouts)
    for layouts in tried(X, Y, max_ranks=2, partial=["max"], max_examples=6):
        assert layouts[0].mesh.size <= 2
        assert {*layouts[0].partial.values(), *layouts[1].partial.values()} <= {"max"}
    for layouts in tried(X, Y, grad=True, partial=["max", "sum"], max_examples=6):
        assert {*layouts[0].partial.values(), *layouts[1].partial.values()} <= {"sum"}


# --- a wrong rule ----------------------------------------------------------------------------

R, S, P = Replicate(), Shard, Partial("sum")


@torch.library.custom_op("testing_layouts::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x * by[:, None]


@scaled.register_fake
def _(x, by):
    return torch.empty_like(x)


@rule(torch.ops.testing_layouts.scaled.default)
def rows_of_scaled(x, by):
    yield (S(0), S(0)), S(0)
    yield (P, P), P  # wrong: a product of sums is no sum of products


def by_rows(x, by):
    return scaled(x, by) + 1


def test_a_wrong_rule_is_found_and_told():
    text = failure(by_rows, X, torch.arange(5.0) + 0.5)
    assert facts(text) == WRONG_RULE
    assert (
        split(text)[1].partition("\nfrom test")[2] == WRONG_RULE_SCRIPT.partition("\nfrom test")[2]
    )
    assert text == failure(by_rows, X, torch.arange(5.0) + 0.5)


def test_the_script_of_a_wrong_rule_fails_the_same_way_in_another_process(tmp_path):
    text = failure(by_rows, X, torch.arange(5.0) + 0.5)
    assert runs(split(text)[1], tmp_path) == facts(text)


def test_an_op_of_a_test_is_written_out(tmp_path):
    @torch.library.custom_op("testing_layouts::rolled", mutates_args=())
    def rolled(x: torch.Tensor, by: int) -> torch.Tensor:
        return x.roll(by, 0)

    @rolled.register_fake
    def _(x, by):
        return torch.empty_like(x)

    def back(ctx, grad):
        return grad.roll(-1, 0), None

    rolled.register_autograd(back)

    @rule(torch.ops.testing_layouts.rolled.default)
    def rows(x, by):
        yield (S(0),), S(0)

    text = failure(lambda x: rolled(x, 1), Y)
    assert "\nrolled.register_autograd(back)\n" in text
    assert "<lambda> gives something else on 2 ranks than in one process." in text
    assert runs(split(text)[1], tmp_path) == facts(text)


def runs(script, folder):
    """What a script says that fails in a process of its own, from nowhere near."""
    file = folder / "repro.py"
    file.write_text(script)
    env = {**os.environ, "PYTHONPATH": str(Path(fdtensor.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, file], cwd=folder, capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.partition("AssertionError: ")[2].rstrip("\n")


# --- functions of DTensors -------------------------------------------------------------------


def column_sums(x):
    return x.sum(0)


def sums_by_hand(x):
    """Column sums that forget all axes but the first."""
    first = x.mesh.axes[0]
    x = x.redistribute(x.mesh.layout(x.mesh.axes))
    out = x.mesh.layout(partial=dict.fromkeys(x.mesh.axes[1:], "avg"))
    return shard_map(lambda x: psum(x.sum(0), first), x.mesh, x.layout, out)(x)


def test_a_wrong_collective_is_found_and_told():
    text = failure(column_sums, X, spread=sums_by_hand)
    assert facts(text) == WRONG_COLLECTIVE
    with pytest.raises(AssertionError) as raised:
        exec(split(text)[1], {})
    assert str(raised.value) == facts(text)


def no_rows(x):
    if "tp" in x.mesh.axes and isinstance(x.layout["tp"], Shard):
        raise RuntimeError("no rows, please\nreally")
    return call(torch.neg, x)


def test_an_error_of_some_layouts_is_found_and_told():
    mesh = Mesh(dp=2, tp=2)
    with pytest.raises(AssertionError) as raised:
        assert_same_on_every_layout(torch.neg, X, spread=no_rows, mesh=mesh)
    assert facts(str(raised.value)) == RAISES
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("spread", "said"),
    [
        (lambda x: call(torch.t, x), "the result is f32[3,5], not f32[5,3]"),
        (lambda x: call(torch.Tensor.double, x), "the result is f64[5,3], not f32[5,3]"),
        (lambda x: 7, "the result is 7, not a plain tensor f32[5,3]"),
        (lambda x: (x,), "the result is a PyTreeSpec((*,)"),
        (
            lambda x: call(torch.add, x, 0.5),
            "the result is 6.5 instead of 6 at [0, 0] on rank 0; 15",
        ),
        (
            lambda x: call(lambda x: x.where(x != 7, 0), x),
            "is 0 instead of 7 at [4, 2] on rank 0; 1 of",
        ),
    ],
)
def test_what_differs_is_told(spread, said):
    text = failure(torch.clone, X, spread=spread, partial=False, max_examples=3)
    assert said in text


def test_a_wrong_gradient_is_told():
    spread = spmd(lambda w, x: x.detach() * 2 + w.detach() + 0 * (x + w))
    text = failure(lambda w, x: x * 2 + w, Y.long(), Y, spread=spread, grad=True)
    assert "  differs:    the gradient of argument 1 is 0 instead of 6 at [0] on rank 0;" in text
    assert_same_on_every_layout(lambda w, x: x * 2 + w, Y.long(), Y, spread=spread, max_examples=3)


def test_integers_are_exact_and_floats_are_close():
    one_more = lambda x: call(torch.add, x, call(torch.gt, x, 2**59))  # noqa: E731
    text = failure(torch.clone, torch.tensor([2**60]), spread=one_more)
    assert "is 1152921504606846977 instead of 1152921504606846976 at [0]" in text
    slightly = {"spread": lambda x: call(torch.add, x, 1e-3), "max_examples": 3}
    assert_same_on_every_layout(torch.clone, Y, atol=1e-2, **slightly)
    assert "by:         0.001 at most, " in failure(torch.clone, Y, **slightly)
    one = {"layouts": [LINE.layout("x")], "law": assert_same_on_layouts}
    text = failure(torch.clone, torch.zeros(2), spread=slightly["spread"], **one)
    assert "  by:         0.001 at most, inf of the value (rtol=1.3e-06, atol=1e-05)\n" in text


def test_tolerances_are_those_of_torch():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex128, torch.int8):
        assert Tolerance().of(dtype) == torch.testing._comparison.default_tolerances(dtype)
    assert Tolerance(1.0, 2.0).of(torch.float64) == (1.0, 2.0)
    assert Tolerance(1.0, 2.0).of(torch.int64) == (0, 0)


# --- the script ------------------------------------------------------------------------------


def test_values_are_small_integers_where_they_fail_too():
    shifted = {"spread": lambda x, y: call(torch.add, x, 1), "max_examples": 2}
    text = failure(lambda x, y: x, torch.rand(2), torch.rand(60), **shifted)
    assert "\nx0 = torch.tensor([6.0, -5.0], dtype=torch.float32)\n" in text
    assert (
        "\nx1 = full_tensor(TensorType((60,), torch.float32, Mesh(one=1).layout()), seed=1)\n"
        in text
    )
    with pytest.raises(AssertionError) as raised:
        exec(split(text)[1], {})
    assert str(raised.value) == facts(text)


def test_what_may_be_rounding_is_called_that():
    text = failure(torch.clone, torch.rand(4) + 0.1, spread=lambda x: call(torch.round, x))
    wanted = "With small integers for values it is right: where this is rounding, pass rtol and "
    assert f"\n\n{wanted}atol, or float64 tensors." in text


@pytest.mark.parametrize("count", [3, 50])
def test_values_are_those_of_the_caller_where_only_they_fail(count):
    x = torch.rand(count) + 0.1
    text = failure(torch.clone, x, spread=lambda x: call(torch.floor, x), max_examples=2)
    assert ("cloudpickle" in text) == (count == 50)
    with pytest.raises(AssertionError) as raised:
        exec(split(text)[1], {})
    assert str(raised.value) == facts(text)


def test_options_and_trees_are_written_out():
    key, n = random.key(2), 3
    f = lambda tree, key, *, more: tree["a"][0] * n + more * 0  # noqa: E731
    other = spmd(lambda tree, key, *, more: tree["a"][0] * n + more * 0 + 1)
    options = {"key": key, "rtol": 1e-3, "on_missing_rule": "error", "grad": True}
    text = failure(f, {"a": [Y, None, "b"]}, more=torch.ones(()), spread=other.f, **options)
    script = split(text)[1]
    assert "    {'a': [x0, None, 'b']},\n    more=x1,\n" in script
    assert "    grad=True,\n    rtol=0.001,\n    key=Key(" in script
    assert "    on_missing_rule='error',\n" in script


# --- mistakes --------------------------------------------------------------------------------


def test_a_call_without_tensors_is_refused():
    with pytest.raises(TraceError) as raised:
        assert_same_on_every_layout(torch.add, 1, 2)
    assert str(raised.value) == NO_TENSOR


def test_a_function_without_derivatives_is_refused():
    with pytest.raises(TraceError) as raised:
        assert_same_on_every_layout(torch.argmax, X, grad=True)
    assert str(raised.value) == NO_DERIVATIVE


def test_layouts_too_few_are_refused():
    with pytest.raises(LayoutError) as raised:
        assert_same_on_layouts(torch.add, X, Y, layouts=[LINE.layout()])
    assert str(raised.value) == TOO_FEW


def test_what_a_function_raises_itself_comes_out_as_it_is():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        assert_same_on_every_layout(torch.mm, X, X)


def test_one_choice_of_layouts_is_checked():
    rows, terms = LINE.layout("x"), LINE.layout(partial={"x": "sum"})
    assert_same_on_layouts(torch.add, X, Y, layouts=[rows, terms], grad=True)
    by = torch.arange(5.0)
    assert_same_on_layouts(by_rows, X, by, layouts=[rows, rows])
    text = failure(by_rows, X, by, layouts=[terms, terms], law=assert_same_on_layouts)
    assert text.startswith("by_rows gives something else on 2 ranks than in one process.")


def test_neither_hypothesis_nor_pytest_is_needed_for_one_choice_of_layouts():
    script = """
        import sys
        from fdtensor.testing import assert_same_on_layouts
        assert not {"hypothesis", "pytest", "torch.distributed.tensor"} & {*sys.modules}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


# --- real ranks ------------------------------------------------------------------------------


@pytest.mark.mesh
def test_real_ranks_are_asked_too(pool4):
    assert_same_on_every_layout(mlp, X, {"up": X.T, "down": X}, ranks=pool4, max_examples=2)
    noisy = lambda x: F.dropout(x * 2, 0.5)  # noqa: E731
    options = {"grad": True, "key": random.key(1)}
    assert_same_on_every_layout(noisy, X, ranks=pool4, max_examples=2, **options)
    two = Mesh(x=2, y=2)
    text = failure(column_sums, X, spread=sums_by_hand, ranks=pool4, mesh=two)
    assert "\n  real ranks: agree with the simulated ones\n" in text


def wrong_where(kind):
    """Column sums that are one too large on a kind of Comm."""
    return lambda x: call(torch.add, call(torch.sum, x, 0), int(type(x.comm).__name__ == kind))


@pytest.mark.mesh
def test_simulated_and_real_ranks_that_do_not_agree_are_told(pool4):
    layouts = [Mesh(x=2).layout("x")]
    one = {"layouts": layouts, "ranks": pool4, "law": assert_same_on_layouts}
    text = failure(column_sums, X, spread=wrong_where("SimulatedComm"), **one)
    wanted = "\n  real ranks: agree with the single process: only simulated ranks fail\n"
    assert wanted in text
    text = failure(column_sums, X, spread=wrong_where("FuncolComm"), **one)
    wanted = (
        "elements are wrong, on ranks 0, 1, though simulated ranks agree with the single process\n"
    )
    assert wanted in text


WRONG_RULE = """\
by_rows gives something else on 2 ranks than in one process.

  argument 0: f32[5,3]{sum:x}
  argument 1: f32[5]{sum:x}
  mesh:       Mesh(x=2)
  differs:    the result is -18 instead of -55 at [4, 2] on rank 1; 13 of 15 elements are wrong, on ranks 0, 1
  by:         37 at most, 3 of the value (rtol=1.3e-06, atol=1e-05)
  program:    by_rows on Mesh(x=2)
                in   a:f32[5,3]{sum:x}  b:f32[5]{sum:x}
                c:f32[5,3]{sum:x} = testing_layouts.scaled a b
                d:f32[5@x,3]      = exchange[axis=x reduce_op=sum way=peer_to_peer] c  36 B
                e:f32[5@x,3]      = add.Tensor d 1
                out  e
              1 collective, 36 B received per rank

Where an op has a rule of yours, verify(op, samples) runs its rows. With ranks=GlooPool(2), real ranks run it too."""

WRONG_RULE_SCRIPT = """\
import torch
import sys
sys.path.insert(0, '...')
from tests.testing.test_every_layout import by_rows
from fdtensor import *
from fdtensor.testing import assert_same_on_layouts

x0 = torch.tensor([[6.0, -5.0, -9.0], [-9.0, 2.0, -2.0], [-4.0, 0.0, 0.0], [-5.0, 4.0, -8.0], [-6.0, -2.0, 7.0]], dtype=torch.float32)
x1 = torch.tensor([3.0, -9.0, -1.0, -5.0, -8.0], dtype=torch.float32)

assert_same_on_layouts(
    by_rows,
    x0,
    x1,
    layouts=[
        Layout(Mesh(x=2), (Partial('sum'),)),
        Layout(Mesh(x=2), (Partial('sum'),)),
    ],
)"""

WRONG_COLLECTIVE = """\
column_sums gives something else on 2 ranks than in one process.

  argument 0: f32[5,3]
  mesh:       Mesh(dp=1, pp=2)
  differs:    the result is -9 instead of -18 at [0] on rank 0; 6 of 6 elements are wrong, on ranks 0, 1
  by:         9 at most, 0.5 of the value (rtol=1.3e-06, atol=1e-05)

The function of DTensors that was passed as spread is to give what the plain one gives. With ranks=GlooPool(2), real ranks run it too."""

RAISES = """\
neg raises RuntimeError on 4 ranks, not in one process.

  argument 0: f32[5@tp,3]
  mesh:       Mesh(dp=2, tp=2)
  raises:     no rows, please

The error with its traceback is the cause of this one. With ranks=GlooPool(4), real ranks run it too."""

NO_TENSOR = """\
add was given no tensor, so there is nothing to lay out.

Pass the tensors of an example call: plain ones, with values."""

NO_DERIVATIVE = """\
no result of argmax depends on a floating tensor by a derivative.

Leave grad=True out, or let it return what is to be differentiated."""

TOO_FEW = """\
1 layouts for 2 tensors.

  tensors: argument 0, argument 1

Give one layout for each tensor among the arguments."""
