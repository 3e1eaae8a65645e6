"""Laws of programs, over a table of functions and any layouts of what they take."""

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor.layouts.errors import (
    CommError,
    LayoutError,
    RuleError,
    TraceError,
    ValueTreeError,
)
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten
from fdtensor.ops.pins import constrain
from fdtensor.plans.cost import GLOO, NCCL
from fdtensor.programs.tracer import trace
from fdtensor.runtime.all_ranks import run_lines
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.call import call
from fdtensor.tensors.connect import distribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.spmd import spmd
from fdtensor.testing.strategies import layouts, types
from fdtensor.testing.values import full_tensor, gather_full, scatter
from tests.support.programs import (
    CASES,
    SMOOTH,
    UNRULED,
    alone,
    checked,
    close,
    differentiated,
    ran,
    settings_of,
    traced,
)

few = settings(max_examples=max(2, settings.default.max_examples // 25))
some = settings(max_examples=settings.default.max_examples // 5)
any_setting = st.sampled_from(sorted(CASES)).flatmap(settings_of)
any_smooth = st.sampled_from(SMOOTH).flatmap(lambda n: settings_of(n, partial=("sum", "avg")))

MESH = Mesh(dp=2, tp=2)
COMM = SimulatedComm(MESH)
X = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) - 4


def laid(*dims, x=X, **partial):
    """A matrix that lies as asked."""
    return distribute(x, MESH.layout(*dims, **partial), COMM)


# --- programs --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_program_gives_each_rank_its_block_of_what_the_plain_function_gives(name):
    @few
    @given(settings_of(name))
    def law(setting):
        checked(setting)

    law()


def test_what_is_made_of_nothing_is_cut_in_the_order_that_it_is_read_in():
    cut = MESH.layout(None, ("tp", "dp"))
    x = TensorType((4, 8), torch.float32, cut)
    made = trace(lambda x: x.relu() * torch.arange(8.0).exp(), x, out_layouts=cut)
    assert made.received_bytes == 0
    nothing = trace(lambda x: torch.ones(4, 8).cos(), x, out_layouts=cut)
    assert nothing.received_bytes == 0
    assert nothing.type_of(nothing.eqns[0].outs[0]).layout == cut


@some
@given(any_setting)
def test_a_program_receives_the_bytes_that_it_announces(setting):
    program = traced(setting)
    _, comm = ran(setting, program)
    ranks = setting.mesh.ranks
    assert [program.received_bytes_at(r) for r in ranks] == [comm.received[r] for r in ranks]
    assert program.received_bytes == max(comm.received[r] for r in ranks)


@some
@given(any_setting)
def test_no_result_is_pending_unless_asked_for(setting):
    assert not any(type.layout.partial for type in traced(setting).out_types)


@some
@given(any_setting)
def test_tracing_again_gives_an_equal_program(setting):
    first, second = traced(setting), traced(setting)
    assert first == second
    assert hash(first) == hash(second)
    assert str(first) == str(second)
    assert first.digest == second.digest


@some
@given(any_setting)
def test_a_line_of_a_program_reads_as_it_is(setting):
    program = traced(setting)
    lines = str(program).splitlines()
    assert len(lines) == len(program.eqns) + 4
    for eqn, line in zip(program.eqns, lines[2:-2], strict=True):
        for v in eqn.outs:
            assert v is None or f"{v}:{program.type_of(v)} " in line


@some
@given(st.data(), st.sampled_from(["mlp", "gradients", "views", "softmax", "attention"]))
def test_results_have_the_layouts_that_are_asked_for(data, name):
    setting = data.draw(settings_of(name))
    wanted = alone(setting)
    asked = [data.draw(layouts(setting.mesh, tuple(t.shape), partial=["sum"])) for t in wanted]
    program = trace(
        lambda *args: alone_of(setting, args), *setting.types, out_layouts=asked, cost=setting.cost
    )
    assert [type.layout for type in program.out_types] == asked
    outs, _ = ran(setting, program)
    for blocks, type, single in zip(outs, program.out_types, wanted, strict=True):
        close([gather_full(blocks, type)], [single])


def alone_of(setting, args):
    """The tensors that the function of a setting returns, as a list."""
    return flatten(setting.case.f(*args))[0]


@some
@given(st.data(), types(dtype=torch.float64, partial=["sum"]))
def test_a_value_can_be_pinned_to_a_layout(data, type):
    pin = data.draw(layouts(type.mesh, type.shape, partial=["sum"]))
    program = trace(lambda x: constrain(x * 2, pin) * 3, type)
    assert type.with_layout(pin) in program.types
    x = full_tensor(type, 0)
    comm = SimulatedComm(type.mesh)
    (blocks,) = run_lines(program, [scatter(x, type, 0)], comm)
    assert torch.equal(gather_full(blocks, program.out_types[0]), 6 * x)


@some
@given(st.data(), types(dtype=torch.float64, partial=["sum"]))
def test_a_pinned_value_has_a_cotangent_that_is_pinned(data, type):
    pin = data.draw(layouts(type.mesh, type.shape, partial=["sum"]))
    program = trace(torch.func.grad(lambda x: (constrain(x, pin) ** 2).sum()), type)
    assert type.with_layout(pin).cotangent() in program.types


@few
@given(settings_of("no rule"))
def test_an_op_without_a_rule_says_so_or_is_refused(setting):
    whole = all(t.layout.placements == (Replicate(),) * t.mesh.ndim for t in setting.types)
    program = checked(setting)
    notes = [eqn for eqn in program.eqns if eqn.note]
    assert not (whole and notes)
    if notes:
        assert "no rule: operands replicated" in str(program)
        with pytest.raises(RuleError, match="has no rule, and its operands are not replicated"):
            traced(setting, on_missing_rule="error")


def test_a_gradient_lies_as_its_parameter():
    params = {
        "w": TensorType((4, 6), torch.float32, MESH.layout("tp")),
        "v": TensorType((6, 3), torch.float32, MESH.layout(None, ("tp", "dp"))),
    }
    x = TensorType((8, 4), torch.float32, MESH.layout("dp"))

    def loss(params, x):
        return ((x @ params["w"]).relu() @ params["v"]).sum()

    program = trace(torch.func.grad(loss), params, x)
    assert program.out_types == (params["v"], params["w"])


# --- calls -----------------------------------------------------------------------------------


@settings(max_examples=settings.default.max_examples // 2)
@given(any_smooth)
def test_gradients_through_spmd_are_those_of_one_process(setting):
    close(*differentiated(setting, SimulatedComm(setting.mesh, cost=setting.cost)))


@settings(max_examples=max(2, settings.default.max_examples // 20))
@given(any_smooth)
def test_second_derivatives_through_spmd_are_those_of_one_process(setting):
    comm = SimulatedComm(setting.mesh, cost=setting.cost)
    close(*differentiated(setting, comm, twice=True))


def test_a_factor_that_is_a_complex_number_has_a_conjugate():
    x = X.clone().requires_grad_()
    found = call(
        lambda x: (x * (1 + 2j)).abs().pow(2).sum(), distribute(x, MESH.layout("dp"), COMM)
    )
    found.full().backward()
    torch.testing.assert_close(x.grad, 10 * X)


def test_backward_leaves_gradients_in_blocks():
    x = distribute(X, MESH.layout("dp", "tp"), COMM).requires_grad_()
    call(lambda x: (x**3).sum(), x).full().backward()
    grads = DTensor(tuple(local.grad for local in x.local), x.type, COMM)
    assert torch.equal(grads.full(), 3 * X**2)


def test_item_and_equal_are_python_values():
    x = laid("dp", "tp")
    assert call(torch.Tensor.item, call(torch.sum, x)) == X.sum().item()
    assert call(lambda x: x.sum().item(), x) == X.sum().item()
    assert call(torch.equal, x, laid(None, "dp")) is True
    assert call(torch.equal, x, call(torch.neg, x)) is False
    assert call(torch.ops.aten.is_same_size.default, x, x) is True
    assert call(torch.Tensor.tolist, x) == X.tolist()
    assert call(lambda x: bool((x > 0).any()), x) is True


DATA_DEPENDENT = {
    "nonzero": torch.nonzero,
    "masked_select": lambda x: torch.masked_select(x, x > 1),
    "unique": torch.unique,
    "unique with counts": lambda x: torch.unique(x, return_counts=True),
    "boolean indexing": lambda x: x[x > 0] * 2,
    "control flow": lambda x: x.sum(0) if x.sum() > 0 else -x,
    "numpy": lambda x: torch.from_numpy(np.array(x.detach().numpy() + 1)),
}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_what_depends_on_data_runs_on_the_whole(name):
    f = DATA_DEPENDENT[name]
    wanted, found = f(X), call(f, laid("dp", "tp"))
    wanted, found = (w if isinstance(w, tuple) else (w,) for w in (wanted, found))
    for single, it in zip(wanted, found, strict=True):
        assert it.layout.placements == (Replicate(), Replicate())
        assert all(torch.equal(local, single) for local in it.local)


def test_what_depends_on_data_has_derivatives():
    x = X.clone().requires_grad_()
    found = call(lambda x: x[x > 0] ** 2, distribute(x, MESH.layout("dp", "tp"), COMM))
    found.full().sum().backward()
    assert torch.equal(x.grad, 2 * X.relu())


def test_calls_that_write_return_new_values():
    x = laid("dp", "tp")
    assert torch.equal(call(torch.Tensor.add_, x, 1).full(), X + 1)
    assert torch.equal(x.full(), X)
    view = call(torch.Tensor.view, x, -1)
    assert not {t.data_ptr() for t in view.local} & {t.data_ptr() for t in x.local}


def test_a_result_that_is_an_argument_shares_no_memory_with_it():
    x = laid("dp", "tp")
    first, second = call(lambda x: (x, x), x)
    places = [t.data_ptr() for y in (x, first, second) for t in y.local]
    assert len(set(places)) == len(places)


def test_python_values_and_none_pass_through():
    found = call(lambda x: {"a": None, "b": [3, x * 2], "c": "text"}, laid("dp"))
    assert (found["a"], found["b"][0], found["c"]) == (None, 3, "text")
    assert torch.equal(found["b"][1].full(), 2 * X)


def test_one_and_true_and_minus_zero_are_different_arguments():
    x = laid("dp", x=X.clone())
    f = spmd(lambda x, n: torch.full((2,), n) + x.sum() * 0)
    assert f(x, 1).dtype == torch.float64
    found = [call(torch.Tensor.__getitem__, x, i).shape for i in (1, True)]
    assert found == [(3,), (1, 4, 3)]
    g = spmd(lambda x, n: torch.copysign(x.abs(), n))
    assert [bool((g(x, n).full() > 0).any()) for n in (0.0, -0.0)] == [True, False]


def test_a_closed_over_tensor_is_read_afresh():
    table = torch.ones(3, dtype=torch.float64)
    f = spmd(lambda x: x + table)
    assert torch.equal(f(laid("dp")).full(), X + 1)
    table.fill_(5)
    assert torch.equal(f(laid("dp")).full(), X + 5)


def test_a_tensor_of_one_element_is_replicated_and_a_bigger_one_on_request():
    x = laid("dp", "tp")
    assert torch.equal(call(torch.add, x, torch.tensor(2.0)).full(), X + 2)
    assert torch.equal(call(torch.add, x, torch.ones(3), plain="replicate").full(), X + 1)


def test_results_may_be_pending_on_request():
    layout = MESH.layout(partial={"tp": "sum"})
    found = call(torch.sum, laid("dp", "tp"), out_layouts=layout)
    assert found.layout is layout
    assert found.full() == X.sum()


def test_ten_is_added_once_to_a_pending_sum():
    pending = Layout(MESH, [Partial("sum"), Shard(0)])
    x = DTensor(scatter(X, TensorType((4, 3), X.dtype, pending), 1), laid().type, COMM)
    x = attrs.evolve(x, type=x.type.with_layout(pending))
    assert call(lambda x: x.sum() + 10, x).full() == X.sum() + 10


@pytest.mark.parametrize("cost", [NCCL, GLOO], ids=lambda c: c.name)
def test_the_second_call_makes_no_new_program(cost):
    comm = SimulatedComm(MESH, cost=cost)
    f = spmd(lambda x, n: x * n)
    x = distribute(X, MESH.layout("dp"), comm)
    for n in (2, 3, 2, 3, 2.0):
        assert torch.equal(f(x, n).full(), n * X)
    assert len(f.programs) == 3


# --- what is refused -------------------------------------------------------------------------


def refused(kind, text):
    """Asserts that the whole text of an error is this."""

    class Refused:
        def __enter__(self):
            return self

        def __exit__(self, kind_found, error, _):
            assert kind_found is kind, error
            error.facts.pop("line", None)
            assert str(error) == text
            return True

    return Refused()


PLAIN = """\
argument 1 is a plain tensor of shape (4, 3) beside DTensors.

  function: call('add')
  mesh:     Mesh(dp=2, tp=2)

Distribute it first: distribute(tensor, layout, comm), or write fd.call(torch.add, ..., \
plain="replicate") if every rank holds the same one."""

NOWHERE = """\
no argument of call('add') is a DTensor.

  arguments: a Tensor, a Tensor

Make one with distribute(tensor, layout, comm), or call the function itself."""

OTHER_COMM = """\
argument 1 of call('add') is on another Comm than the arguments before it.

  first:     SimulatedComm(Mesh(dp=2, tp=2))
  second:    SimulatedComm(Mesh(dp=2, tp=2))
  differ in: nothing: they come from two calls of connect

Make all DTensors with one Comm: connect(mesh) once, then pass it on."""

OTHER_MESH = """\
the arguments are on 2 meshes, a traced function runs on one.

  mesh 0: Mesh(dp=2, tp=2)
  mesh 1: Mesh(tp=2)

Redistribute to one mesh before: only those of the same ranks are taken as one, where the axes of \
each are products of axes that they could share."""

NO_PREFIX = """\
out_layouts is no prefix of what the function returns.

  out_layouts: a list in place of a leaf

Give one Layout, None or like(0) for all, or a tree of the same structure."""

NO_DIM = """\
mesh axis 'dp' shards dim 0 of a tensor that has 0 dims.

  shape:  ()
  layout: (dp=S(0), tp=R)
  mesh:   Mesh(dp=2, tp=2)

A tensor without dims can only be replicated: leave 'dp' as Replicate()."""

NO_LAYOUT = """\
3 is not a Layout.

Write Layout(mesh, placements)."""

NO_RULE = """\
tests.unruled.default has no rule, and its operands are not replicated.

Give it one with @fdtensor.rule, or pass on_missing_rule="replicate"."""

RANDOM = """\
aten.bernoulli.p draws random numbers, and has no key to draw from.

Write fd.call(torch.nn.functional.dropout, ..., key=random.key(0)), or call the function around \
it so; or switch dropout off with eval()."""


def other():
    """A matrix on a mesh of half of the ranks."""
    return distribute(X, Mesh(tp=2).layout("tp"), COMM)


REFUSED = {
    "a plain tensor": (ValueTreeError, PLAIN, lambda x: call(torch.add, x, X)),
    "no DTensor": (TraceError, NOWHERE, lambda x: call(torch.add, X, X)),
    "two Comms": (
        CommError,
        OTHER_COMM,
        lambda x: call(torch.add, x, distribute(X, x.layout, SimulatedComm(MESH))),
    ),
    "two meshes": (TraceError, OTHER_MESH, lambda x: call(torch.add, x, other())),
    "no prefix": (
        ValueTreeError,
        NO_PREFIX,
        lambda x: call(torch.add, x, x, out_layouts=[x.layout, x.layout]),
    ),
    "no such dim": (LayoutError, NO_DIM, lambda x: call(torch.sum, x, out_layouts=x.layout)),
    "no layout": (LayoutError, NO_LAYOUT, lambda x: call(lambda x: constrain(x, 3), x)),
    "no rule": (RuleError, NO_RULE, lambda x: call(UNRULED, x, on_missing_rule="error")),
    "random numbers": (TraceError, RANDOM, lambda x: call(torch.nn.functional.dropout, x)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_is_a_sentence_the_facts_and_what_to_do(name):
    kind, text, f = REFUSED[name]
    received = COMM.received.total()
    with refused(kind, text):
        f(laid("dp"))
    assert COMM.received.total() == received


def test_writing_to_a_closed_over_tensor_is_refused():
    table = torch.zeros(4, 3, dtype=torch.float64)

    def write(x):
        table.add_(x)
        return x

    with pytest.raises(TraceError, match="writes to a tensor that the function closes over"):
        call(write, laid("dp"))
    assert not table.any()


def test_a_gradient_left_in_a_closed_over_tensor_is_refused():
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def leave(x):
        (x.sum() * weight.sum()).backward()
        return x

    with pytest.raises(TraceError, match="left a gradient in a tensor that it closes over"):
        call(leave, laid("dp"))
    assert weight.grad is None


def test_arguments_without_a_hash_are_told_apart():
    x = distribute(torch.arange(6.0), Mesh(x=2).layout("x"), SimulatedComm(Mesh(x=2)))
    for i in range(4):
        found = call(torch.Tensor.__getitem__, x, slice(i, i + 2))
        assert found.full().tolist() == [i, i + 1]


def test_strides_over_the_memory_of_a_view_are_refused():
    x = TensorType((2, 3), torch.float32, Mesh(x=2).layout("x"))
    with pytest.raises(TraceError, match="as_strided of a view"):
        trace(lambda x: x[1:].as_strided((2, 2), (1, 1)), x)
