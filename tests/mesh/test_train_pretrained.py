"""A published Llama trained on four gloo ranks: its losses are those of one process."""

import pytest
import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.tensors.connect import connect
from fdtensor.train import AdamW, Job, Pretrained, plain_losses
from fdtensor.train.loop import losses
from tests.support.depth import times
from tests.support.llama import small_llama

pytestmark = pytest.mark.mesh

MESHES = [
    *(Mesh(dp=4), Mesh(fsdp=4), Mesh(tp=4), Mesh(sp=4)),
    *(Mesh(dp=2, tp=2), Mesh(fsdp=2, sp=2), Mesh(pp=2, dp=2)),
]


def losses_here(job, mesh):
    return list(losses(job, connect(mesh)))


@pytest.mark.few(2)
@pytest.mark.parametrize(("dtype", "apart"), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_llama_trains_on_real_ranks_as_on_one_process(pool4, tmp_path, mesh, dtype, apart):
    steps = times(20, 200)
    folder = small_llama(tmp_path, num_hidden_layers=2 if "pp" in mesh.axes else 1)
    numbers = AdamW(lr=3e-3, until=steps)
    job = Job(Pretrained(folder, length=16), numbers, steps, batch=8, dtype=dtype)
    wanted = list(plain_losses(job))
    for found in pool4.run(losses_here, job, mesh, timeout=400):
        assert found == pytest.approx(wanted, abs=apart)
    assert wanted[-1] < wanted[0] - 0.3
