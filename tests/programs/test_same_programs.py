"""One function and its types have one program: on simulated and real ranks, from step to step."""

import functools

import pytest
import torch
import torch.nn.functional as F

from fdtensor import (
    GLOO,
    SimulatedComm,
    TraceError,
    call,
    connect,
    distribute,
    like,
    spmd,
    trace,
)
from fdtensor.layouts.mesh import Mesh
from fdtensor.testing.pool import GlooPool

MESH = Mesh(x=2, y=2)


def heat(u):
    """One step on a plane, with fixed edges."""
    inner = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]
    return u + 0.1 * F.pad(inner, (1, 1, 1, 1))


def mlp(x, v, w):
    return torch.relu(x @ v) @ w


def gradients(x, v, w):
    return torch.func.grad(lambda v, w: mlp(x, v, w).square().mean(), (0, 1))(v, w)


def attention(x, v, w):
    return F.scaled_dot_product_attention(x @ v, x @ v, x @ w.t())


FUNCTIONS = (mlp, gradients, attention)


def operands(comm):
    layouts = MESH.layout("x"), MESH.layout(None, "y"), MESH.layout("y")
    tensors = torch.ones(8, 16), torch.ones(16, 32), torch.ones(32, 16)
    return [distribute(t, layout, comm) for t, layout in zip(tensors, layouts)]


def digests(comm):
    """Those of programs, of what `call` ran, and of a plan."""
    x, v, w = operands(comm)
    programs = [spmd(f).trace(x, v, w).digest for f in FUNCTIONS]
    return [*programs, v.plan_to(MESH.layout("y")).digest, call(torch.mm, x, v).layout]


def digests_here(**options):
    return digests(connect(MESH, **options))


@pytest.mark.mesh
def test_real_ranks_run_the_programs_of_simulated_ones(pool4: GlooPool):
    expected = digests(SimulatedComm(MESH))
    assert pool4.run(digests_here) == [expected] * 4
    other = digests(SimulatedComm(MESH, cost=GLOO))
    assert other != expected
    assert pool4.run(functools.partial(digests_here, cost=GLOO)) == [other] * 4


@pytest.mark.parametrize("layout", [("x", "y"), ("x",), (None, ("y", "x")), ()], ids=str)
def test_a_state_stays_where_it_is(layout):
    u = distribute(torch.rand(16, 16), MESH.layout(*layout), SimulatedComm(MESH))
    step, expected = spmd(heat), u.full()
    for _ in range(3):
        u, expected = step(u), heat(expected)
        assert u.layout is MESH.layout(*layout)
    torch.testing.assert_close(u.full(), expected)
    assert len(step.programs) == 1


def test_a_result_is_like_the_one_argument_of_its_shape_and_dtype():
    x, v, _ = operands(SimulatedComm(MESH))
    same = distribute(torch.ones(8, 16), MESH.layout(None, "y"), x.comm)
    assert spmd(torch.tanh)(x).layout is x.layout
    assert [r.layout for r in spmd(lambda x, v: (v + 1, x.sum(), x * 2))(x, v)][::2] == [
        v.layout,
        x.layout,
    ]
    both = trace(lambda a, b: a + b, x, same)  # of two layouts the cheaper one
    assert both.out_types[0].layout in (x.layout, same.layout, MESH.layout("x", "y"))


def test_a_layout_may_be_said_to_be_that_of_an_argument():
    x, v, w = operands(SimulatedComm(MESH))

    def f(x, tree, scale):
        return x.t() * scale, {"v": tree["v"] * 2, "w": tree["w"] * 2}

    tree = {"v": v, "w": w}
    out = spmd(f, out_layouts=(like(0), like("tree")))(x, tree, scale=2.0)
    assert out[0].layout is x.layout
    assert {n: t.layout for n, t in out[1].items()} == {n: t.layout for n, t in tree.items()}
    assert call(torch.mm, x, v, out_layouts=like(1)).layout is v.layout


def test_an_argument_that_is_not_there_is_refused():
    x, v, _ = operands(SimulatedComm(MESH))
    with pytest.raises(TraceError) as raised:
        spmd(lambda a, b: a @ b, out_layouts=like(2))(x, v)
    assert str(raised.value) == REFUSED


REFUSED = """\
out_layouts is like argument 2, which was not given.

  positions: 0 to 1
  names:     'a', 'b'

Give the position or the name of an argument."""
