"""Ops of which torch has no derivative, op by op with operands that require grad."""

import pytest
import torch

from fdtensor import Mesh, SimulatedComm, TraceError, distribute

MESH = Mesh(x=3)
COMM = SimulatedComm(MESH)
X = torch.arange(1.0, 21).reshape(5, 4)


def leaf():
    return distribute(X, MESH.layout("x"), COMM).requires_grad_()


@pytest.mark.parametrize("f", [lambda x: x // 2, lambda x: torch.heaviside(x - 4, x)])
def test_a_step_has_the_derivative_0_that_it_has_between_its_jumps(f):
    x = leaf()
    step = f(x)
    assert torch.equal(step.full(), f(X))
    (step * x).sum().backward()
    assert torch.equal(x.grad.full(), f(X))


def test_what_is_counted_by_it_is_computed():
    x = leaf()
    ((x // 2).long() * x).sum().backward()
    assert torch.equal(x.grad.full(), X // 2)


@pytest.mark.parametrize("f", [lambda x: 2 % x, lambda x: torch.special.zeta(x, x)])
def test_others_are_refused_and_say_what_to_do(f):
    with pytest.raises(TraceError, match="is not implemented") as told:
        f(leaf())
    assert "x.detach()" in str(told.value)
    assert torch.equal(f(leaf().detach()).full(), f(X))
