"""What a user sees: few names first, the others in namespaces, signatures and types that help."""

import importlib
import inspect
import json
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fdtensor as fd

NAMESPACES = (
    "cluster",
    "collectives",
    "cost",
    "errors",
    "func",
    "io",
    "optim",
    "parallel",
    "plans",
    "random",
    "testing",
)

IMPORTABLE = """
AllGather AllReduce AllToAll ArgumentError Broadcast CheckpointError Collective Colwise Comm
CommError CostModel DTensor DataDependentError Discovered Eqn Exchange FallbackWarning
FdtensorError FuncolComm Fused GLOO GradScaler IndexRangeError Layout LayoutError LocalCluster
LossScale Mask Mesh MeshError NCCL NotTorchError OperandError Pad Partial Placement Plan PlanError
Program Ragged ReduceScatter Replicate Rowwise RuleError Scale SequenceParallel Shard SimulatedComm
Slice Step StridedShard TensorType TraceError ValueTreeError VocabParallel WorkerError all_gather
all_to_all axis_index axis_size bind calibrate call checkpoint_contents clip_grad_norm
clip_grad_norm_ connect constrain debug discover distribute estimate explain found_inf from_local
from_torch fuse grad grad_and_value gradients groups hessian initialize input_reshard jacfwd jacrev
jvp layouts_for like load_checkpoint load_safetensors local_cluster local_tensors plan pmax pmean
pmin ppermute psum redistribute reduce_scatter remove_input_reshard rule run run_fused
save_checkpoint save_safetensors saved_as scan shard_map shard_batches shards show spmd
tensor_parallel to_torch total_norm trace transition verify vjp vmap
""".split()  # noqa: SIM905
"""What `from fdtensor import ...` gives, in the first sight or not."""


def test_the_first_sight_is_small():
    seen = [name for name in dir(fd) if not name.startswith("_")]
    assert len(seen) <= 48
    assert set(NAMESPACES) <= set(seen)
    assert set(fd.__all__) | set(NAMESPACES) == set(seen)


@pytest.mark.parametrize("name", IMPORTABLE)
def test_every_name_can_be_imported_from_the_top(name):
    space: dict[str, object] = {}
    exec(f"from fdtensor import {name}", space)
    assert space[name] is getattr(fd, name)


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_namespace_has_what_it_lists(name):
    module = importlib.import_module(f"fdtensor.{name}")
    assert getattr(fd, name) is module
    assert dir(module) == sorted(module.__all__) or set(module.__all__) <= set(dir(module))
    assert [public for public in module.__all__ if not hasattr(module, public)] == []
    assert module.__doc__


@pytest.mark.parametrize("name", sorted({*NAMESPACES} - {"optim", "random", "testing"}))
def test_the_names_of_a_namespace_are_those_of_the_top(name):
    module = getattr(fd, name)
    assert [n for n in module.__all__ if getattr(fd, n) is not getattr(module, n)] == []


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        fd.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        fd.io.nothing  # noqa: B018


def test_no_submodule_is_hidden():
    for found in pkgutil.walk_packages(fd.__path__, "fdtensor."):
        package, _, name = found.name.rpartition(".")
        if name != "__main__":
            importlib.import_module(found.name)
            shown = getattr(importlib.import_module(package), name)
            assert isinstance(shown, ModuleType), f"{found.name} is hidden by {shown!r}"


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("Shard", "(dim: 'int') -> None"),
        ("Ragged", "(dim: 'int', sizes: 'Sequence[int]') -> None"),
        ("Partial", "(reduce_op: 'ReduceOp' = 'sum') -> None"),
        ("Mesh", "(*, links={}, **sizes)"),
        (
            "Layout",
            "(mesh: 'Mesh', placements: 'Sequence[Placement]', "
            "order: 'Order | None' = None) -> 'None'",
        ),
        ("TensorType", "(shape: 'Iterable[int]', dtype: 'torch.dtype', layout: 'Layout') -> None"),
        ("AllGather", "(axes: 'Axes', dims: 'Dims') -> None"),
    ],
)
def test_a_record_shows_its_signature(name, signature):
    assert str(inspect.signature(getattr(fd, name))) == signature


TYPED = """
import torch
from torch import Tensor

import fdtensor as fd


@fd.spmd
def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@fd.spmd(out_layouts=None)
def scaled(x: Tensor, n: int = 2) -> dict[str, Tensor]:
    return {"a": x * n}


@fd.spmd
def step(params: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return params, x.sum()


@fd.spmd
def untyped(x, w):
    return torch.relu(x @ w), w


comm = fd.connect(fd.Mesh(dp=2))
x = fd.distribute(torch.ones(4, 4), comm.mesh.layout("dp"), comm)
a: fd.DTensor = product(x, w=x)
b: fd.DTensor = scaled(x, n=3)["a"]
params, loss = step({"w": x}, x)
print(a.full(), b.layout, loss.full(), untyped(x, x)[0].full())
print(product(x, x, key=fd.random.key(0)).full(), product.trace(x, x).received_bytes)
print(fd.call(torch.add, x, 2).full(), fd.call(torch.relu, x, out_layouts=None).full())
moved = fd.redistribute({"a": x}, comm.mesh.layout())
print(moved["a"].layout, comm.mesh, fd.random.normal(fd.random.key(0), (2,)))
print(fd.shard_map(lambda x: fd.collectives.psum(x, "dp"), comm.mesh)(x))
print(fd.Ragged(0, [1, 3]), fd.io.to_torch, fd.psum, fd.parallel.Colwise(), fd.__version__)
"""

WRONG = """
product(x)
product(x, x, x)
scaled(x, m=3)
scaled(x, n="a")
untyped(x)
fd.call(torch.relu)
fd.connect()
fd.redistribute(x)
fd.Mesh(2)
fd.Shard("a")
fd.shard_map(lambda x: torch.relu(x))
fd.nothing
fd.io.nothing
"""


@pytest.mark.slow
def test_a_typed_script_checks_and_a_missing_argument_does_not(tmp_path):
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent)) or "pyright"
    script = tmp_path / "script.py"
    script.write_text(TYPED + WRONG)
    command = [pyright, "--pythonpath", sys.executable, "--outputjson", str(script)]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    if not said.stdout.startswith("{"):
        pytest.skip(f"pyright does not run here: {said.stderr[:200]}")
    errors = json.loads(said.stdout)["generalDiagnostics"]
    lines = {error["range"]["start"]["line"] + 1 for error in errors}
    first = len(TYPED.splitlines())
    assert [error for error in errors if error["range"]["start"]["line"] < first] == []
    wrong = WRONG.strip().splitlines()
    assert [text for n, text in enumerate(wrong, first + 2) if n not in lines] == []


def test_what_the_typed_script_does_runs_too():
    exec(compile(TYPED, "script.py", "exec", dont_inherit=True), {"__name__": "script"})
