"""Tests of programs/options.py: what is said beside a function reaches every program of it."""

import attrs
import pytest
import torch

from fdtensor import SimulatedComm, TraceError, ValueTreeError, call, distribute, spmd
from fdtensor.layouts.mesh import Mesh
from fdtensor.programs.options import Options
from fdtensor.tensors.call import _spmd_of

MESH = Mesh(x=2)


@pytest.fixture
def x():
    return distribute(torch.arange(6.0).reshape(2, 3), MESH.layout("x"), SimulatedComm(MESH))


def test_options_of_other_names_with_equal_values_are_not_the_same(x):
    plain = torch.ones(2, 3)
    assert call(torch.add, x, plain, plain="replicate").full()[1, 2] == 6
    with pytest.raises(ValueTreeError, match="plain tensor"):
        call(torch.add, x, plain, on_missing_rule="replicate")


def test_a_layout_that_is_asked_for_again_takes_the_program_that_there_is(x):
    def split(t):
        return {"a": t + 1, "b": t * 2}

    for _ in range(3):
        call(split, x, out_layouts={"a": MESH.layout(None, "x"), "b": None})
    function = _spmd_of(split, {"out_layouts": {"a": MESH.layout(None, "x"), "b": None}})
    assert len(function.programs) == 1
    assert call(split, x, out_layouts={"a": MESH.layout(), "b": None})["a"].layout is MESH.layout()


@pytest.mark.parametrize(
    "options",
    [{"plain": "replicate"}, {"check": "always"}, {"check": "never", "on_missing_rule": "error"}],
    ids=str,
)
def test_the_second_derivative_has_the_options_of_the_first(x, options):
    f = spmd(lambda x: (x * x * x).sum(), **options)
    x = x.requires_grad_()
    (first,) = torch.autograd.grad(f(x).full(), x.local[:1], create_graph=True)
    first.sum().backward()
    (derived,) = f.derived.values()
    assert attrs.evolve(derived.options, out_layouts=None) == f.options == Options(**options)


def test_an_option_that_is_none_is_refused():
    with pytest.raises(TraceError) as raised:
        spmd(torch.add, on_missing_rule="gather")
    assert str(raised.value) == REFUSED


REFUSED = """\
on_missing_rule='gather' is no option.

Write on_missing_rule= one of 'replicate', 'error'."""
