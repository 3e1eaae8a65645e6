"""A traced function whose arguments, pins and results have layouts on several meshes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fdtensor as fd
from fdtensor import Mesh, Partial, Replicate, Shard, SimulatedComm, TensorType, distribute, spmd
from fdtensor.collectives import psum
from fdtensor.errors import TraceError, ValueTreeError

DENSE, EXPERTS, ALL = Mesh(dp=4, tp=2), Mesh(edp=2, ep=4), Mesh(all=8)
SWAPPED = Mesh.from_ranks([[0, 4], [1, 5], [2, 6], [3, 7]], ("inner", "outer"))
MESHES = DENSE, EXPERTS, ALL, SWAPPED
COMM = SimulatedComm(DENSE)
X = torch.arange(64.0).reshape(8, 8)
W = torch.arange(64.0).reshape(8, 8).flip(0)


@st.composite
def layouts(draw, pending=False):
    """Any layout of a matrix on one of the meshes."""
    mesh = draw(st.sampled_from(MESHES))
    places = [Replicate(), Shard(0), Shard(1), *([Partial("sum")] if pending else [])]
    return fd.Layout(mesh, [draw(st.sampled_from(places)) for _ in mesh.axes])


@given(st.tuples(layouts(True), layouts()), st.tuples(layouts(), layouts()), layouts())
def test_numbers_are_those_of_one_process_whatever_meshes_layouts_are_on(given, pins, asked):
    def f(x, w):
        y = fd.constrain(x @ w, pins[0]) + 1
        return fd.constrain(y - w, pins[1]) * 2, y.sum(0)

    x, w = (distribute(t, at, COMM) for t, at in zip((X, W), given, strict=True))
    g = spmd(f, out_layouts=(asked, None))
    out, total = g(x, w)
    expected = f(X, W)
    assert out.layout is asked
    assert out.full().equal(expected[0])
    assert total.full().equal(expected[1])
    out, total = g(x, w)  # by the program that is kept
    assert out.full().equal(expected[0])


@given(st.tuples(layouts(), layouts()), layouts(), st.booleans())
def test_derivatives_have_the_meshes_of_their_arguments(given, pin, op_by_op):
    def f(x, w):
        y = fd.constrain(x, pin) @ w
        return (y * y).sum()

    x, w = (distribute(t % 5, at, COMM) for t, at in zip((X, W), given, strict=True))
    expected = torch.func.grad(f, argnums=(0, 1))(X % 5, W % 5)
    own = fd.grad(f if op_by_op else spmd(f), argnums=(0, 1))(x, w)
    for grad, other in zip(own, expected, strict=True):
        assert grad.full().equal(other)
    x, w = (t.detach().requires_grad_() for t in (x, w))
    (f if op_by_op else spmd(f))(x, w).backward()
    for leaf, other in zip((x, w), expected, strict=True):
        assert leaf.grad.layout is leaf.layout
        assert leaf.grad.full().equal(other)


def test_results_come_on_the_mesh_of_the_first_argument_or_of_their_like():
    x = distribute(X, DENSE.layout("dp"), COMM)
    state = {"w": distribute(W, EXPERTS.layout("edp", "ep"), COMM)}
    total, after = spmd(lambda x, state: (x.sum(1), {"w": state["w"] + x}))(x, state)
    assert after["w"].layout is state["w"].layout
    assert total.mesh is DENSE
    program = fd.trace(lambda x, w: x + w, x, state["w"])
    assert program.mesh.axes == ("edp", "dp_0", "tp")


@pytest.mark.parametrize("placement", [Shard(0), Partial("sum")])
def test_a_result_has_the_layout_that_was_asked_for_on_axes_of_one_rank_too(placement):
    mesh = Mesh(ep=8, one=1)
    x = distribute(X, DENSE.layout("dp"), COMM)
    asked = fd.Layout(mesh, [Replicate(), placement])
    out = spmd(lambda x: x * 2, out_layouts=asked)(x)
    assert out.layout is asked
    assert out.full().equal(X * 2)


def test_a_pin_that_nothing_reads_moves_nothing():
    at = ALL.layout(None, "all")
    program = fd.trace(lambda x: fd.constrain(x, at), type_on(DENSE, "dp"))
    assert not program.eqns
    assert "nothing is sent" in program.explain()


def test_the_program_is_on_a_given_mesh_where_that_will_do():
    program = fd.trace(lambda x: fd.constrain(x, ALL.layout("all")) + 1, type_on(DENSE, "dp"))
    assert program.mesh is DENSE
    assert "f32[8@(dp,tp),8]" in str(program)
    assert program.received_bytes == 32  # what tp gathers: a slice costs nothing


def test_a_shard_map_of_another_mesh_stands_inside():
    def routed(block):
        return block + psum(block, "ep")

    at = EXPERTS.layout(("edp", "ep"))
    mapped = fd.shard_map(routed, mesh=EXPERTS, in_layouts=at, out_layouts=at)
    x = distribute(X, DENSE.layout("dp"), COMM)
    out = spmd(lambda x: mapped(x * 2) + 1)(x)
    blocks = (2 * X).reshape(2, 4, 8)
    expected = (blocks + blocks.sum(1, keepdim=True)).reshape(8, 8) + 1
    assert out.full().equal(expected)
    assert out.mesh is DENSE
    assert (mapped(x * 2) + 1).full().equal(expected)
    with pytest.raises(ValueTreeError, match="a DTensor on Mesh"):
        fd.shard_map(routed, mesh=EXPERTS)(x)


@pytest.mark.parametrize("of", [torch.nn.functional.layer_norm, torch.nn.functional.rms_norm])
def test_a_region_around_a_call_pins_nothing_of_it_or_later(of):
    with fd.region(ALL.layout(None, "all")):
        around = spmd(lambda x: of(x * 2, (8,)))(distribute(X, DENSE.layout("dp"), COMM))
    program = fd.trace(lambda x: of(x, (8,)), type_on(DENSE, "dp"))
    assert around.layout is DENSE.layout("dp")
    assert program.received_bytes == 0


def test_constraints_on_another_mesh_hold_at_all_sizes_of_a_dim():
    at = ALL.layout("all")
    step = spmd(lambda x: fd.constrain(x * 2, at) + 1, dynamic={"x": 0})
    for n in (8, 16, 7, 8, 0):
        x = torch.arange(8.0 * n).reshape(n, 8)
        assert step(distribute(x, DENSE.layout("dp"), COMM)).full().equal(x * 2 + 1)
    x = distribute(torch.zeros(9, 8), DENSE.layout("dp"), COMM)
    with pytest.raises(TraceError) as error:
        step(x)
    assert str(error.value) == UNEVEN


UNEVEN = """\
f32[9@all,8] is cut unevenly, and no layout on the mesh of the program has such blocks.

  layout:  (all=S(0))
  own:     Mesh(all=8)
  program: Mesh(dp=4, tp=2)

Pad the dim until the ranks divide it, or write a layout on the other mesh."""


def test_meshes_of_other_ranks_are_refused():
    halves = Mesh(half=4)
    with pytest.raises(TraceError, match="the arguments are on 2 meshes"):
        fd.trace(torch.add, type_on(DENSE, "dp"), type_on(halves, "half"))
    with pytest.raises(TraceError, match="constrain is on another mesh than the arguments"):
        fd.trace(lambda x: fd.constrain(x, halves.layout("half")), type_on(DENSE, "dp"))


def type_on(mesh, *cuts):
    return TensorType((8, 8), torch.float32, mesh.layout(*cuts))
