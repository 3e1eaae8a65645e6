"""Autograd's anomaly mode: it reads values, of which a function that is recorded has none."""

import pytest
import torch

from fdtensor import FallbackWarning, Mesh, SimulatedComm, bind, distribute, spmd


def root(x, w):
    return (torch.sqrt(x @ w) * 0).sum()


def operands(value):
    mesh = Mesh(dp=2)
    comm = SimulatedComm(mesh)
    x = distribute(torch.full((6, 4), value), mesh.layout("dp"), comm)
    return x, distribute(torch.ones(4, 2), mesh.layout(), comm).requires_grad_()


def test_anomaly_mode_leaves_programs_alone_and_stays_as_it_was():
    x, w = operands(1.0)
    f, g = spmd(root), spmd(torch.func.grad(root, 1))
    with torch.autograd.set_detect_anomaly(True):
        with pytest.warns(FallbackWarning, match="not inside of its program"):
            f(x, w).backward()
        with pytest.warns(FallbackWarning, match="not inside of its program"):
            g(x, w.detach())
        f(x.detach(), w.detach())  # recorded anew, and said once
        assert torch.is_anomaly_check_nan_enabled()
    assert torch.equal(w.grad.full(), torch.zeros(4, 2))


@pytest.mark.filterwarnings("ignore:anomaly mode looks")
@pytest.mark.parametrize("f", [spmd(root), root])
def test_anomaly_mode_finds_nans_in_what_a_program_gives_and_op_by_op(f):
    x, w = operands(0.0)
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.warns(UserWarning, match="Error detected"),
        pytest.raises(RuntimeError, match="nan values"),
    ):
        f(x, w).backward()


@pytest.mark.filterwarnings("ignore:anomaly mode looks")
def test_a_bound_module_trains_in_anomaly_mode():
    x, w = operands(1.0)
    module = torch.nn.Linear(4, 2, bias=False)
    params = {"weight": w.detach().T.requires_grad_()}
    with torch.autograd.set_detect_anomaly(True):
        bind(module, params)(x).sum().backward()
    assert torch.equal(params["weight"].grad.full(), torch.full((2, 4), 6.0))


def test_anomaly_mode_says_nothing_op_by_op_where_there_are_no_nans():
    x, w = operands(1.0)
    with torch.autograd.set_detect_anomaly(True):
        root(x, w).backward()
    assert torch.equal(w.grad.full(), torch.zeros(4, 2))
