"""Tests of testing/sources.py: what is written out gives what it was written from."""

import functools
import math
import sys

import pytest
import torch
import torch.nn.functional as F

from fdtensor import Mesh, Partial, call, random, spmd
from fdtensor.testing.sources import Names

BY = 3
TABLE = torch.tensor([[0.1, float("inf")], [float("nan"), -2.0]])


def doubled(x):
    return x * 2


def written(value, name="value"):
    """The value that the script of a value gives, and the script."""
    names = Names()
    text = names.spelled(value, name)
    script = "\n".join(["import torch", *names.imports, "from fdtensor import *", *names.lines])
    space = {}
    exec(script, space)
    return eval(text, space), script, text


def local(x, by=2.0, *, dtype: torch.dtype = torch.float64):
    return F.relu(doubled(x).to(dtype)) * BY + math.pi * by + TABLE.nansum(1)[1]


def nested(depth):
    scale = torch.full((2,), 0.5)

    def inner(x):
        return recurse(x, depth) * scale

    def recurse(x, n):
        return x if n == 0 else recurse(x + 1, n - 1)

    return inner


FUNCTIONS = {
    "of a module": doubled,
    "with globals": local,
    "closure": nested(3),
    "lambda": lambda x: doubled(x) - BY,
    "lambda on a line with others": [lambda x: x.sin(), lambda x: x.cos()][1],
    "default of a lambda": (lambda by: lambda x, by=by: x + by)(2.0),
    "torch": torch.relu,
    "functional": F.gelu,
    "method": torch.Tensor.neg,
    "packet": torch.ops.aten.relu,
    "overload": torch.ops.aten.relu.default,
    "partial": functools.partial(torch.mul, other=2),
    "module": torch.nn.Linear(2, 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("home", [__name__, "__main__"])
def test_a_written_function_gives_the_same(name, home, monkeypatch):
    f = FUNCTIONS[name]
    for own in (doubled, local, f):
        if getattr(own, "__module__", None) == __name__:
            monkeypatch.setattr(own, "__module__", home)  # as in a script or notebook
    found, script, _ = written(f)
    x = torch.tensor([0.3, -1.0])
    torch.testing.assert_close(found(x), f(x), equal_nan=True)
    assert ("cloudpickle" in script) == (name in ("default of a lambda", "partial", "module"))
    assert (f"from {__name__} import" in script) == (
        home == __name__ and name in ("of a module", "with globals", "lambda")
    )


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        2.5,
        float("inf"),
        "text",
        [1, (2,), (), {"a": [3.5]}],
        torch.bfloat16,
        Mesh(dp=2).layout("dp"),
        Partial("max"),
        random.key(5),
        torch.Size([2, 3]),
        {1, 2},
    ],
    ids=repr,
)
def test_a_written_value_is_equal(value):
    found, _, _ = written(value)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        TABLE,
        torch.tensor(3),
        torch.empty(2, 0),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.arange(50) / 7,
    ],
    ids=str,
)
def test_a_written_tensor_is_the_same_to_the_bit(tensor):
    found, script, _ = written(tensor)
    torch.testing.assert_close(found, tensor, rtol=0, atol=0, equal_nan=True)
    assert ("cloudpickle" in script) == (tensor.numel() > 24)


def test_a_value_is_written_once():
    x = torch.ones(2)
    found, script, _ = written([x, x, doubled])
    assert found[0] is found[1]
    assert script.count("torch.tensor") == 1


def test_an_op_whose_shapes_a_lambda_tells_is_written_with_it():
    @torch.library.custom_op("testing_sources::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    names = Names()
    assert names.spelled(twice, "op") == "twice"
    assert names.lines[-2:] == [
        "f = lambda x: torch.empty_like(x)",
        "twice.register_fake(f)",
    ]


def test_an_spmd_function_is_written_as_one():
    found, _, text = written(spmd(doubled))
    assert text == "spmd(doubled)"
    x = Mesh(x=2).layout()
    assert call(found.f, torch.ones(1)) if False else found.f is doubled
    _, script, _ = written(spmd(doubled, out_layouts=x))
    assert "cloudpickle" in script or "yours" in script


def test_what_cannot_be_stored_is_named():
    names = Names()
    text = names.spelled(sys._getframe(), "frame")
    assert names.lines == ["frame = ...  # frame: frame of yours, which cannot be written here"]
    assert text == "frame"
