"""Tests of layouts/opaque.py: `torch.compile` around what runs plans, and inside of programs."""

import pytest
import torch

import fdtensor
from fdtensor import (
    SimulatedComm,
    call,
    distribute,
    from_local,
    plan,
    run,
    shard_map,
    spmd,
    trace,
)
from fdtensor.layouts.mesh import Mesh

MESH = Mesh(x=2)
COMM = SimulatedComm(MESH)
ROWS, COLUMNS = MESH.layout("x"), MESH.layout(None, "x")


def layer(x, w):
    return torch.relu(x @ w) + 1


step = spmd(layer)
mapped = shard_map(lambda x: x * 2, MESH, in_layouts=ROWS, out_layouts=ROWS)
sgd = fdtensor.optim.SGD(lr=0.5)


AROUND = {
    "spmd": lambda x, w: step(x, w),
    "call": lambda x, w: call(torch.matmul, x, w),
    "redistribute": lambda x, w: x.redistribute(COLUMNS),
    "full": lambda x, w: x.full() * 2,
    "between": lambda x, w: distribute(x.full() + 1, ROWS, COMM).full() * 2,
    "run": lambda x, w: from_local(
        run(plan(x.type, COLUMNS), x.local, COMM), x.type.with_layout(COLUMNS), COMM
    ),
    "trace": lambda x, w: trace(layer, x.type, w.type).received_bytes,
    "shard_map": lambda x, w: mapped(x),
    "optim": lambda x, w: sgd.step({"w": w}, {"w": w}, sgd.init({"w": w}))[0]["w"],
}


def operands():
    torch.manual_seed(0)
    x, w = torch.randn(4, 6), torch.randn(6, 6)
    return distribute(x, ROWS, COMM), distribute(w, MESH.layout(), COMM)


def whole(result):
    return result.full() if hasattr(result, "full") else result


@pytest.mark.parametrize("name", AROUND)
def test_a_compiled_function_breaks_its_graph_around_it(name):
    torch._dynamo.reset()
    around = AROUND[name]
    compiled = torch.compile(around, backend="eager")
    for _ in range(2):
        due, got = whole(around(*operands())), whole(compiled(*operands()))
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(due))


def test_what_is_torch_alone_is_still_compiled():
    torch._dynamo.reset()
    graphs = []

    def backend(module, _):
        graphs.append({str(n.target) for n in module.graph.nodes})
        return module.forward

    def f(x, w):
        return torch.sin(step(x, w).full())

    torch.compile(f, backend=backend)(*operands())
    assert any("sin" in text for names in graphs for text in names)
    assert not any("mm" in text or "c10d" in text for names in graphs for text in names)


def test_gradients_flow_through():
    torch._dynamo.reset()
    grads = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="eager")):
        x, w = operands()
        w.requires_grad_()
        wrap(lambda x, w: step(x, w).full().square().sum())(x, w).backward()
        grads.append(torch.stack([t.grad for t in w.local]))
    assert torch.equal(*grads)


@pytest.mark.parametrize("inside", ["function", "module", "part"])
def test_a_program_of_what_is_compiled_is_that_of_what_was_written(inside):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.part = torch.compile(layer) if inside == "part" else layer

        def forward(self, x, w):
            return self.part(x, w)

    f = torch.compile(layer) if inside == "function" else Layer()
    f = torch.compile(f) if inside == "module" else f
    x, w = operands()
    due = trace(layer, x.type, w.type)
    lines = [str(eqn.op) for eqn in trace(f, x.type, w.type).eqns]
    assert lines == [str(eqn.op) for eqn in due.eqns]
    assert torch.equal(spmd(f)(x, w).full(), step(x, w).full())
