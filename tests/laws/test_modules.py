"""Unchanged torch modules on distributed values: results and gradients on any layout."""

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten
from fdtensor.plans.cost import GLOO, NCCL
from fdtensor.programs.tracer import trace
from fdtensor.runtime.all_ranks import run_lines
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.testing.tensor_strategies import sharded
from fdtensor.testing.values import scatter
from tests.support.models import MODELS
from tests.support.programs import same

few = settings(max_examples=max(2, settings.default.max_examples // 25))


def made(name, batch):
    """A module in float64, its parameters and buffers, and what it takes."""
    torch.manual_seed(batch)
    make, inputs = MODELS[name]
    module = make().double().train()
    return module, dict(module.named_parameters()), dict(module.named_buffers()), inputs(batch)


def step_of(module):
    """The loss, the gradients, the results and the new buffers of a module."""

    def loss(params, buffers, x):
        buffers = {name: t.clone() for name, t in buffers.items()}
        out = torch.func.functional_call(module, {**params, **buffers}, (x,))
        tensors = [t for t in flatten(out)[0] if t.is_floating_point()]
        return sum((t**2 + t).mean() for t in tensors), (tensors, buffers)

    return torch.func.grad_and_value(loss, has_aux=True)


def spread(tree, types):
    return [scatter(t.detach(), type, 0) for t, type in zip(flatten(tree)[0], flatten(types)[0])]


@st.composite
def places(draw, name):
    """A batch size, a mesh, prices, and types of parameters, buffers and the batch."""
    batch = draw(st.integers(2, 5))
    _, params, buffers, x = made(name, batch)
    types = draw(sharded((params, buffers, {"x": x}), partial=False, as_types=True))
    return batch, types[2]["x"].mesh, draw(st.sampled_from([NCCL, GLOO])), types


def check(name, place):
    batch, mesh, cost, (param_types, buffer_types, x_types) = place
    module, params, buffers, x = made(name, batch)
    step = step_of(module)
    program = trace(step, param_types, buffer_types, x_types["x"], cost=cost)
    args, types = (params, buffers, x), (param_types, buffer_types, x_types["x"])
    outs = run_lines(program, spread(args, types), SimulatedComm(mesh))
    for blocks, type, single in zip(outs, program.out_types, flatten(step(*args))[0], strict=True):
        same(blocks, type, single)
    return program


@pytest.mark.few(4)
@pytest.mark.parametrize("name", MODELS)
def test_a_module_gives_the_results_and_gradients_of_one_process(name):
    @few
    @given(places(name))
    def law(place):
        check(name, place)

    law()


@pytest.mark.few(5)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_new_buffers_lie_as_what_they_are_of(name):
    mesh = Mesh(dp=2, tp=2)
    _, params, buffers, x = made(name, 4)
    rows = {
        n: TensorType(t.shape, t.dtype, mesh.layout(*["tp"][: t.ndim])) for n, t in params.items()
    }
    rest = {n: TensorType(t.shape, t.dtype, mesh.layout()) for n, t in buffers.items()}
    spread_x = {"x": TensorType(x.shape, x.dtype, mesh.layout("dp"))}
    program = check(name, (4, mesh, NCCL, [rows, rest, spread_x]))
    assert program.out_types[: len(rows)] == tuple(flatten(rows)[0])
    assert program.out_types[len(program.out_types) - len(rest) :] == tuple(flatten(rest)[0])


def test_batch_norm_takes_the_statistics_of_the_whole_batch():
    mesh = Mesh(dp=3)
    module = nn.BatchNorm1d(2).double()
    x = torch.randn(700, 2, dtype=torch.float64)
    state = dict(module.state_dict())
    whole = {n: TensorType(t.shape, t.dtype, mesh.layout()) for n, t in state.items()}

    def forward(state, x):
        state = {n: t.clone() for n, t in state.items()}
        return torch.func.functional_call(module, state, (x,)), state

    rows = TensorType((700, 2), x.dtype, mesh.layout("dp"))
    program = trace(forward, whole, rows, cost=attrs.evolve(NCCL, latency=0.0, launch=()))
    values = spread((state, x), (whole, rows))
    outs = run_lines(program, values, SimulatedComm(mesh))
    wanted = flatten(forward(state, x))[0]
    for blocks, type, single in zip(outs, program.out_types, wanted, strict=True):
        same(blocks, type, single)
    assert program.out_types[0] == rows
    assert program.received_bytes < x.nbytes
