"""Several machines: two network namespaces, with a cable between them, stand for two nodes."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fdtensor.runtime.interfaces import choose_interface, interface_to, unreachable
from fdtensor.train import Job, Size, plain_losses

MANUAL = Path(__file__).parents[2] / "notebooks" / "MANUAL.md"
ADDRESSES = {"fdnode0": "10.77.113.1", "fdnode1": "10.77.113.2"}
SMALL = "--layers 1 --width 16 --heads 4 --length 8 --batch 4 --steps 3 --every 1"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def cabled() -> None:
    """Two namespaces, each with one end of a cable."""
    first, second = ADDRESSES
    for node in ADDRESSES:
        ip("netns", "add", node)
    ip("link", "add", first, "netns", first, "type", "veth", "peer", second, "netns", second)
    for node, address in ADDRESSES.items():
        ip("-n", node, "addr", "add", f"{address}/24", "dev", node)
        for link in (node, "lo"):
            ip("-n", node, "link", "set", link, "up")
        ip("netns", "exec", node, "true")


@pytest.fixture
def nodes():
    """The nodes, which are gone after the test."""
    if not shutil.which("ip"):
        pytest.skip("there is no ip")
    try:
        try:
            cabled()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces: {error.stderr.decode().strip()}")
        yield [*ADDRESSES]
    finally:
        for node in ADDRESSES:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", node)


def started(node: str, *words: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        ["ip", "netns", "exec", node, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        start_new_session=True,
    )


def torchrun(number: int, *words: str) -> list[str]:
    """torchrun on one of two nodes, as the manual says."""
    static = f"--nnodes 2 --node-rank {number} --nproc-per-node 2"
    meet = f"--master-addr {ADDRESSES['fdnode0']} --master-port 29533"
    return [sys.executable, "-m", "torch.distributed.run", *static.split(), *meet.split(), *words]


def ended(jobs: list[subprocess.Popen]) -> str:
    """What the first of the jobs has printed, once it is done; the others end then."""
    try:
        return jobs[0].communicate(timeout=200)[0]
    finally:
        for job in jobs:
            if job.poll() is None:  # torchrun may wait minutes for one that is gone
                os.killpg(job.pid, 9)
            job.communicate()


def losses_in(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step +\d+  (\d+\.\d+)", text)]


def wanted() -> list[float]:
    size = Size(layers=1, width=16, heads=4, length=8)
    return list(plain_losses(Job(size, steps=3, batch=4)))


# --- interfaces ------------------------------------------------------------------------------


def test_the_loopback_is_no_interface_to_another_machine(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert interface_to("127.0.0.1") is None
    assert interface_to("localhost") is None
    assert choose_interface("127.0.0.1") is None
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_what_the_environment_names_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert choose_interface("10.77.113.2") is None
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_host_without_an_address_has_no_interface():
    assert interface_to("no.such.host.invalid") is None


def test_ranks_on_the_loopback_are_unreachable_from_another_machine_alone():
    one = ["a 127.0.0.1", "a 127.0.0.1"]
    assert unreachable(one) == []
    assert unreachable([*one, "b 10.0.0.2"]) == [0, 1]
    assert unreachable(["a 10.0.0.1", "b 10.0.0.2"]) == []
    assert unreachable(["a 10.0.0.1", "b the loopback", "c ::1"]) == [1, 2]


# --- two nodes -------------------------------------------------------------------------------


@pytest.mark.mesh
@pytest.mark.slow
def test_a_job_on_two_nodes_has_the_losses_of_one_process(nodes):
    command = ["-m", "fdtensor", "train", "--mesh", "dp=2,tp=2", *SMALL.split()]
    text = ended([started(node, *torchrun(i, *command)) for i, node in enumerate(nodes)])
    assert losses_in(text) == pytest.approx(wanted(), abs=2e-4), text


@pytest.mark.mesh
@pytest.mark.slow
def test_nodes_that_do_not_reach_each_other_are_told_by_which_interface(nodes):
    command = ["-m", "fdtensor", "train", "--mesh", "dp=4", *SMALL.split()]
    lo = {"GLOO_SOCKET_IFNAME": "lo"}
    text = ended([started(node, *torchrun(i, *command), **lo) for i, node in enumerate(nodes)])
    assert "ranks 0-3 listen to their own machine alone, and others are on another one." in text
    assert re.search(r"at: 127\.0\.0\.1\n", text)


GOING = """
import torch
import fdtensor as fd

comm = fd.connect(fd.Mesh(x=4), timeout=20)
x = fd.distribute(torch.arange(8.0), comm.mesh.layout("x"), comm)
for i in range(10**6):
    y = fd.redistribute(x, comm.mesh.layout())
    if i == 10 and comm.rank == 0:
        print("going", flush=True)
"""


@pytest.mark.mesh
@pytest.mark.slow
def test_a_cable_that_is_pulled_is_told_by_the_ranks_beyond_it(nodes, tmp_path):
    script = tmp_path / "going.py"
    script.write_text(GOING)
    jobs = [started(node, *torchrun(i, str(script))) for i, node in enumerate(nodes)]
    assert jobs[0].stdout is not None
    before = []
    for line in jobs[0].stdout:
        before.append(line)
        if line.startswith("going"):
            break
    assert before[-1] == "going\n", before
    ip("-n", "fdnode1", "link", "set", "fdnode1", "down")
    text = ended(jobs)
    assert "ranks 2-3 do not answer: the process has ended, is stopped, or cannot be" in text


# --- launchers, as the manual has them -------------------------------------------------------


def block(first_line: str) -> str:
    """The block of the manual that begins so."""
    blocks = re.findall(r"```\w+\n(.*?)```", MANUAL.read_text(), re.DOTALL)
    return next(text for text in blocks if text.startswith(first_line))


SCONTROL = "#!/bin/bash\nprintf 'fdnode0\\nfdnode1\\n'\n"

SRUN = """#!/bin/bash
for node in fdnode0 fdnode1; do
    ip netns exec $node unshare --uts bash -c 'hostname '$node'; exec "$@"' -- "$@" &
done
wait
"""


@pytest.fixture
def hosts(nodes):
    """The nodes, each of which knows the names of both."""
    text = "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in ADDRESSES.items())
    folders = [Path("/etc/netns", node) for node in nodes]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(text)
        yield nodes
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.mesh
@pytest.mark.slow
@pytest.mark.deep
def test_the_script_for_slurm_trains_on_two_nodes(hosts, tmp_path):
    # what SLURM has, as far as the script asks for it
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = block("#!/bin/bash\n#SBATCH").replace("--checkpoint run", SMALL)
    slurm = {"JOB_NODELIST": "fdnode[0-1]", "JOB_NUM_NODES": "2", "JOB_ID": "7"}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=200,
        env={
            **os.environ,
            **{f"SLURM_{name}": value for name, value in slurm.items()},
            "SLURM_GPUS_ON_NODE": "2",
            "OMP_NUM_THREADS": "1",
            "PATH": path,
        },
    )
    assert losses_in(done.stdout) == pytest.approx(wanted(), abs=2e-4), done.stderr


@pytest.mark.mesh
@pytest.mark.slow
def test_the_script_for_ray_runs(tmp_path):
    pytest.importorskip("ray")
    script = tmp_path / "ray_job.py"
    script.write_text(block("import torch\nfrom ray.train"))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=200
    )
    assert "the sum is 6.0" in done.stdout, done.stderr
