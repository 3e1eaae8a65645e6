"""What a traced function does besides computing: attributes of modules, draws, odd containers."""

import random
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import nn

import fdtensor as fd
from fdtensor import FallbackWarning, Mesh, SimulatedComm, TraceError, bind, distribute, spmd

MESH = Mesh(x=2)
COMM = SimulatedComm(MESH)


def ones(*shape):
    return distribute(torch.ones(shape), MESH.layout("x"), COMM)


def whole(module):
    return {n: distribute(p.detach(), MESH.layout(), COMM) for n, p in module.named_parameters()}


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.last, self.all, self.named, self.loss = None, [], {}, torch.zeros(())

    def forward(self, x):
        y = self.linear(x)
        self.last, self.loss = y, y.sum()
        self.all.append(y)
        self.named["y"] = y
        self.fresh = (y, 1)
        return y


def test_attributes_with_tensors_of_a_program_have_their_earlier_values():
    module = Keeping()
    loss, all_before, named = module.loss, module.all, module.named
    with pytest.warns(FallbackWarning, match=r"Keeping.last, Keeping.all, Keeping.named"):
        bind(module, whole(module))(ones(6, 4))
    assert module.last is None
    assert module.loss is loss
    assert (module.all, module.named) == ([], {})
    assert module.all is all_before
    assert module.named is named
    assert not hasattr(module, "fresh")
    module(torch.ones(6, 4))  # still plain torch


@pytest.mark.filterwarnings("ignore::fdtensor.FallbackWarning")
def test_and_are_read_inside_of_the_function():
    module = Keeping()
    params = whole(module)

    def total(params, x):
        y = torch.func.functional_call(module, params, (x,))
        return y.sum() + module.loss

    expected = 2 * module(torch.ones(6, 4)).sum()
    module.all.clear()
    torch.testing.assert_close(spmd(total)(params, ones(6, 4)).full(), expected.detach())


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_draws_of_python_are_told(draw):
    f = spmd(lambda x: x * draw())
    with pytest.warns(FallbackWarning, match="draws from .*random, and its program keeps"):
        f(ones(4))


class Mode(Enum):
    PLAIN, DOUBLED = 1, 2


class Soft(nn.Module):
    def __init__(self):
        super().__init__()
        self.tau, self.scales, self.drop, self.shift = 1.0, [1.0, 2.0], nn.Dropout(0.0), None
        self.mode = Mode.PLAIN

    def forward(self, x):
        y = self.drop(x / self.tau * sum(self.scales) * self.mode.value)
        return y if self.shift is None else y + self.shift


def test_attributes_of_modules_that_change_make_another_program():
    module = Soft()
    holders = [bind(module, {}), spmd(lambda x: module(x)), spmd(lambda x, m=(module,): m[0](x))]

    def agree():
        for f in holders:
            assert torch.equal(f(ones(4)).full(), module(torch.ones(4)))

    agree()
    for tau in (0.5, 0.25, 0.125, 1.0, True, 2):
        module.tau = tau
        agree()
    module.scales[1] = 5.0
    agree()
    module.shift = torch.arange(4.0)
    agree()
    module.shift = torch.ones(4)
    agree()
    module.mode, module.nan = Mode.PLAIN, float("nan")
    agree()
    module.mode = Mode.DOUBLED
    agree()
    module.drop = nn.Tanh()  # without tensors, as the one before
    agree()
    before = len(holders[1].programs)
    agree()
    assert len(holders[1].programs) == before


@dataclass
class Pair:
    total: Any
    double: Any


class Known:
    def __init__(self, total, double):
        self.total, self.double = total, double


torch_pytree.register_pytree_node(
    Known, lambda k: ([k.total, k.double], ["total"]), lambda leaves, _: Known(*leaves)
)


@pytest.mark.parametrize("kind", [Pair, Known])
def test_nodes_of_torch_and_dataclasses_are_nodes(kind):
    out = spmd(lambda x: kind(x.sum(), x * 2))(ones(4))
    assert isinstance(out, kind)
    assert out.total.full() == 4
    assert torch.equal(spmd(lambda k: k.double + k.total)(out).full(), torch.full((4,), 6.0))


def test_what_pytrees_do_not_look_into_is_refused():
    class Own(dict):
        pass

    class Bare:
        def __init__(self, x):
            self.x = x

    x = ones(4)
    for kind in (lambda x: Own(y=x), lambda x: {x}, lambda x: iter([x]), lambda x: Bare([x])):
        with pytest.raises(TraceError, match="and the tensors in it are not seen"):
            spmd(kind)(x)
    assert spmd(lambda x: (x, torch.Size([2, 3])))(x)[1] == torch.Size([2, 3])
    assert isinstance(spmd(lambda x: (x, Bare(3)))(x)[1], Bare)
    assert isinstance(spmd(lambda x: OrderedDict(y=x))(x)["y"], fd.DTensor)


def test_a_module_that_counts_its_calls_is_told_of():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    f = bind(Counting(), {})
    for n in (1.0, 2.0):
        with pytest.warns(FallbackWarning, match=r"sets Counting.calls.*is recorded anew"):
            assert torch.equal(f(ones(4)).full(), torch.full((4,), n))


def test_the_call_of_modules_is_what_it_was_whoever_else_changes_it():
    """Another library may patch it during a recording, and put back what it came upon there."""
    plain = torch.nn.Module.__call__
    layer, x = torch.nn.Linear(2, 2), fd.TensorType((4, 2), torch.float32, Mesh(x=2).layout("x"))
    taken = []

    def patched(module, *args, **kwargs):
        return taken[0](module, *args, **kwargs)

    def during(x):
        taken.append(torch.nn.Module.__call__)
        torch.nn.Module.__call__ = patched
        return layer(x)

    try:
        fd.trace(during, x)
        torch.nn.Module.__call__ = taken[0]
        assert layer(torch.ones(1, 2)).shape == (1, 2)
        fd.trace(layer, x)
        assert layer(torch.ones(1, 2)).shape == (1, 2)
        assert torch.nn.Module.__call__ is plain
    finally:
        torch.nn.Module.__call__ = plain
