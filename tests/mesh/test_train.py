"""The GPT trained on four gloo ranks for 200 steps: its losses are those of one process."""

import pytest
import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.tensors.connect import connect
from fdtensor.train import Job, Size, plain_losses
from fdtensor.train.job import losses

pytestmark = pytest.mark.mesh

JOB = Job(Size(layers=1, width=16, heads=4, length=8), steps=200, batch=4, dtype=torch.float64)


def losses_here(mesh, regather):
    return list(losses(JOB, connect(mesh), regather=regather))


@pytest.mark.parametrize(
    ("mesh", "regather"),
    [
        (Mesh(dp=4), False),
        (Mesh(tp=4), False),
        (Mesh(sp=4), False),
        (Mesh(fsdp=4), False),
        (Mesh(fsdp=4), True),
        (Mesh(dp=2, tp=2), False),
    ],
    ids=str,
)
def test_200_steps_on_real_ranks_go_as_on_one_process(pool4, mesh, regather):
    wanted = list(plain_losses(JOB))
    for found in pool4.run(losses_here, mesh, regather, timeout=240):
        assert found == pytest.approx(wanted, rel=1e-6)
    assert wanted[-1] < wanted[0] - 1
