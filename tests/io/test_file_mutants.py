"""Tests that damaged files are noticed, and that forged ones run nothing and take no memory.

With `--deep` 10,000 mutants of each kind are tried, by default some dozens.
"""

import random
import resource
import sys
import tracemalloc
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fdtensor as fd
from fdtensor.io.checkpoint.folder import sealed
from fdtensor.io.pickles.machine import BASE, TIMES
from fdtensor.layouts.errors import CheckpointError
from fdtensor.layouts.mesh import Mesh
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.connect import distribute
from tests.support.depth import times
from tests.support.file_mutants import damaged, file_mutants, forged

MESH = Mesh(x=2)
COMM = SimulatedComm(MESH)
FULL = {
    "w": torch.arange(60.0).reshape(6, 10),
    "v": torch.arange(60.0).reshape(6, 10) * 2,
    "b": torch.arange(5, dtype=torch.int16),
}
STATE = {**FULL, "step": 7, "betas": (0.9, [1, {"a": b"b"}])}
LIKE = {**{name: MESH.layout("x") for name in FULL}, "step": 0, "betas": 0}
EMPTY = {name: torch.zeros_like(x) if name in FULL else None for name, x in STATE.items()}

AUDITED = ("os.system", "subprocess", "os.exec", "os.posix_spawn", "os.fork", "socket", "exec")
seen: list[str] = []
watched = {"on": False}


def _hook(event, args):
    if watched["on"] and event.startswith(AUDITED):
        seen.append(event)


sys.addaudithook(_hook)


@pytest.fixture(scope="module", params=["ours", "torch's", "safetensors", "several safetensors"])
def stored(request, tmp_path_factory):
    """A directory with a checkpoint, its files, and what loads it."""
    path = tmp_path_factory.mktemp("stored")
    state = {name: distribute(x, MESH.layout("x"), COMM) for name, x in FULL.items()}
    if request.param == "ours":
        fd.save_checkpoint({**STATE, **state}, path, COMM)
    elif request.param == "torch's":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(STATE, checkpoint_id=path, no_dist=True)
    else:
        whole = {name: MESH.layout() for name in FULL}
        one = request.param == "safetensors"
        fd.io.save_safetensors(
            {name: distribute(x, whole[name], COMM) for name, x in FULL.items()},
            path / "x.safetensors" if one else path,
            COMM,
        )
    return request.param, path, {file.name: file.read_bytes() for file in path.iterdir()}


def load(kind, path):
    if "safetensors" in kind:
        fd.io.checkpoint_contents(path)
        return fd.io.load_safetensors(path, {name: LIKE[name] for name in FULL}, COMM)
    fd.io.checkpoint_contents(path)
    return fd.load_checkpoint(path, LIKE, COMM)


def right(found):
    rest = {name: STATE[name] for name in found if name not in FULL}
    return all(torch.equal(found[name].full(), x) for name, x in FULL.items()) and rest == {
        name: found[name] for name in rest
    }


def loads(kind, path, size):
    """What a directory gives, or the error of ours that it gives: within its memory."""
    tracemalloc.start()
    watched["on"] = True
    try:
        return load(kind, path)
    except CheckpointError as error:
        return error
    finally:
        watched["on"] = False
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < TIMES * size + BASE + (1 << 20), f"{peak} bytes for {size}"
        assert not seen, seen


def written(path, files):
    for name, data in files.items():
        (path / name).write_bytes(data)


@pytest.fixture
def little_memory():
    """Tensors of more than a few gigabytes cannot be made meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (4 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def test_what_is_not_damaged_loads(stored):
    kind, path, files = stored
    assert right(loads(kind, path, sum(map(len, files.values()))))


def test_damage_is_noticed_or_does_not_matter(stored, little_memory):
    kind, path, files = stored
    noticed = 0
    for mutant in file_mutants(files, damaged, times(60, 3_000), seed=1):
        try:
            written(path, {mutant.name: mutant.data})
            found = loads(kind, path, sum(map(len, files.values())) + len(mutant.data))
            noticed += isinstance(found, CheckpointError)
            assert isinstance(found, CheckpointError) or right(found), mutant
        finally:
            written(path, files)
    assert noticed


def test_what_is_forged_runs_nothing(stored, little_memory, tmp_path):
    kind, path, files = stored
    canary = tmp_path / "canary"
    for mutant in file_mutants(files, forged(str(canary)), times(60, 2_000), seed=2):
        data = mutant.data
        if mutant.name == ".metadata" and random.Random(len(data)).random() < 0.8:
            data = sealed(data.partition(b"\nfdtensor saved=")[0], 1)  # forgers seal as well
        try:
            written(path, {mutant.name: data})
            loads(kind, path, sum(map(len, files.values())) + len(data))
            assert not canary.exists(), mutant
        finally:
            written(path, files)
