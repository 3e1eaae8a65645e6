"""The GPT trained on four gloo ranks: its losses are those of one process."""

import pytest
import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.tensors.connect import connect
from fdtensor.train import Job, Size, plain_losses
from fdtensor.train.loop import losses
from tests.support.depth import times

pytestmark = pytest.mark.mesh

SIZE = Size(layers=2, width=16, heads=4, length=8)


def losses_here(job, mesh, regather):
    return list(losses(job, connect(mesh), regather=regather))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("mesh", "regather"),
    [
        (Mesh(dp=4), False),
        (Mesh(tp=4), False),
        (Mesh(sp=4), False),
        (Mesh(fsdp=4), False),
        (Mesh(fsdp=4), True),
        (Mesh(dp=2, tp=2), False),
        (Mesh(pp=2, fsdp=2), False),
    ],
    ids=str,
)
def test_training_on_real_ranks_goes_as_on_one_process(pool4, mesh, regather):
    job = Job(SIZE, steps=times(30, 200), batch=4, dtype=torch.float64)
    wanted = list(plain_losses(job))
    for found in pool4.run(losses_here, job, mesh, regather, timeout=480):
        assert found == pytest.approx(wanted, rel=1e-6)
    assert wanted[-1] < wanted[0] - times(0, 1)
