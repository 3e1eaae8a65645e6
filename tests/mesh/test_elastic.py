"""A job under torchrun goes on by itself: after a rank is killed, and on fewer ranks."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fdtensor.train import Job, Size, plain_losses

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc"),
]

SIZE, BATCH, STEPS = Size(layers=1, width=16, heads=4, length=8), 6, 60
SAVED = 5
"""How many steps lie between two checkpoints."""


def started(folder: Path, ranks: int, steps: int) -> subprocess.Popen:
    """The job under torchrun, on as many ranks as there are."""
    torchrun = (
        f"torch.distributed.run --nproc-per-node {ranks} --max-restarts 2 --rdzv-backend c10d"
    )
    options = (
        f"--layers 1 --width 16 --heads 4 --length 8 --batch {BATCH} --steps {steps} --every 1"
    )
    return subprocess.Popen(
        [
            *(sys.executable, "-m", *torchrun.split(), "--rdzv-endpoint", "127.0.0.1:0"),
            *("-m", "fdtensor", "train", "--mesh", "dp=*", *options.split()),
            *("--checkpoint", str(folder), "--save-every", str(SAVED)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def steps_in(folder: Path) -> list[int]:
    """The steps of which there is a checkpoint."""
    return sorted(int(path.parent.name[5:]) for path in folder.glob("step_*/.metadata"))


def ended(job: subprocess.Popen) -> str:
    """What a job has printed, once it is done."""
    try:
        text, _ = job.communicate(timeout=180)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, text
    return text


def losses(text: str) -> dict[int, float]:
    """The last loss that was printed of each step."""
    return {int(i): float(x) for i, x in re.findall(r"step +(\d+) +([\d.]+)", text)}


def test_a_job_goes_on_after_a_rank_is_killed_and_then_on_fewer_ranks(tmp_path):
    wanted = dict(enumerate(plain_losses(Job(SIZE, steps=STEPS + 20, batch=BATCH))))
    job = started(tmp_path, 3, STEPS)
    latest = time.monotonic() + 120
    while not steps_in(tmp_path) and time.monotonic() < latest and job.poll() is None:
        time.sleep(0.05)
    ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    saved = steps_in(tmp_path)[-1]
    os.kill(int(ranks[-1]), signal.SIGKILL)
    text = ended(job)
    begun = [int(step) for step in re.findall(r"goes on at step (\d+)", text)]
    assert len(begun) == 1
    assert begun[0] >= saved
    assert max(i for i in losses(text.partition("goes on")[0])) < begun[0] + SAVED + 1
    assert losses(text) == pytest.approx({i: wanted[i] for i in range(STEPS)}, abs=1e-3)

    text = ended(started(tmp_path, 2, STEPS + 20))
    assert f"goes on at step {STEPS}" in text
    assert "Mesh(dp=2)" in text
    assert losses(text) == pytest.approx({i: wanted[i] for i in range(STEPS, STEPS + 20)}, abs=1e-3)
