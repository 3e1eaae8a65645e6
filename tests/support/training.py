"""Training on a simulated mesh, beside one process."""

import pytest

from fdtensor import SimulatedComm
from fdtensor.train import losses, plain_losses


def assert_trains_as_alone(job, mesh, **how):
    """The losses on a mesh are those of one process, and the model moves."""
    on_mesh = list(losses(job, SimulatedComm(mesh), **how))
    assert on_mesh == pytest.approx(list(plain_losses(job)), rel=1e-9)
    assert on_mesh[0] != on_mesh[-1]
