"""Tests of io/safetensors.py: any blocks from files of whole tensors, and back."""

import json
import tempfile
from math import prod
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fdtensor.io.checkpoint import Stored, checkpoint_contents, headers
from fdtensor.io.checkpoint.headers import DTYPES
from fdtensor.io.safetensors import load_safetensors, save_safetensors
from fdtensor.layouts.errors import CheckpointError, FdtensorError, ValueTreeError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.connect import connect, distribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.testing.strategies import types
from fdtensor.testing.values import full_tensor, gather_full, scatter

R, S0 = Replicate(), Shard(0)
few = settings(max_examples=settings.default.max_examples // 2)
fewer = settings(max_examples=settings.default.max_examples // 8)

LINE, SQUARE = Mesh(x=3), Mesh(dp=2, tp=2)
anything = types(dtype=None).filter(lambda type: type.dtype in DTYPES)


def spread(tensor, layout):
    return distribute(tensor, layout, SimulatedComm(layout.mesh))


def reads(monkeypatch):
    """What is read of each tensor, as shapes, by name: filled while the patch is there."""
    found = {}

    @attrs.frozen
    class Slice:
        name: str
        inner: object

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __getitem__(self, where):
            part = self.inner[where]
            found.setdefault(self.name, []).append(tuple(part.shape))
            return part

    class File:
        def __init__(self, *args):
            self.inner = safe_open(*args)

        def __enter__(self):
            self.inner.__enter__()
            return self

        def __exit__(self, *exc):
            return self.inner.__exit__(*exc)

        def keys(self):
            return self.inner.keys()

        def metadata(self):
            return self.inner.metadata()

        def get_slice(self, name):
            return Slice(name, self.inner.get_slice(name))

    safe_open = headers.safe_open
    monkeypatch.setattr(headers, "safe_open", File)
    return found


# --- there and back --------------------------------------------------------------------------


@given(anything, st.integers(0, 99))
def test_any_blocks_are_those_of_the_tensor_in_the_file(type, seed):
    full = full_tensor(type, seed)
    with tempfile.TemporaryDirectory() as path:
        save_file({"x": full}, f"{path}/a.safetensors")
        world = SimulatedComm(Mesh(world=27))
        found = load_safetensors(f"{path}/a.safetensors", {"x": type}, world)["x"]
    assert found.type is type
    assert torch.equal(gather_full(found.local, type), full)


@given(anything, anything, st.integers(0, 99))
def test_any_tensors_become_files_that_hold_them_whole(a, b, seed):
    world = SimulatedComm(Mesh(world=27))
    fulls = [full_tensor(type, seed) for type in (a, b)]
    tree = {
        "p": [{"x": DTensor(scatter(t, type, seed), type, world)} for t, type in zip(fulls, (a, b))]
    }
    with tempfile.TemporaryDirectory() as path:
        save_safetensors(tree, path, world)
        found = {
            k: v for file in Path(path).glob("*.safetensors") for k, v in load_file(file).items()
        }
    assert sorted(found) == ["p.0.x", "p.1.x"]
    for tensor, full in zip((found["p.0.x"], found["p.1.x"]), fulls, strict=True):
        assert tensor.dtype == full.dtype
        assert torch.equal(tensor, full)


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_every_dtype_of_the_format_goes_both_ways(tmp_path, dtype):
    full = torch.arange(24, dtype=torch.uint8).view(torch.uint8)[: 3 * dtype.itemsize]
    full = (full % 2).view(torch.bool) if dtype is torch.bool else full.view(dtype)
    save_safetensors({"x": spread(full, LINE.layout("x"))}, tmp_path, SimulatedComm(LINE))
    found = load_safetensors(tmp_path, {"x": LINE.layout()}, SimulatedComm(LINE))["x"]
    assert torch.equal(found.local[1].view(torch.uint8), full.view(torch.uint8))


@few
@given(types(partial=False), st.integers(0, 99))
def test_no_rank_reads_more_than_its_block(type, seed):
    full = full_tensor(type, seed)
    with tempfile.TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        found = reads(patch)
        save_file({"x": full, "other": full.clone()}, f"{path}/a.safetensors")
        comm = SimulatedComm(type.mesh)
        load_safetensors(f"{path}/a.safetensors", {"x": type}, comm, strict=False)
    blocks = {type.box(type.mesh.coord(rank)): type.local_shape(rank) for rank in type.mesh.ranks}
    assert set(found) <= {"x"}
    assert sum(map(prod, found.get("x", []))) == sum(map(prod, blocks.values()))


# --- layouts and paths -----------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    """The files of a model, with an index."""
    one = {"embed.weight": torch.arange(12.0).reshape(6, 2), "scale": torch.tensor(2.0)}
    two = {"head.weight": torch.arange(6.0).reshape(3, 2), "head.bias": torch.arange(3.0)}
    save_file(one, tmp_path / "model-00001-of-00002.safetensors")
    save_file(two, tmp_path / "model-00002-of-00002.safetensors")
    weights = dict.fromkeys(one, "model-00001-of-00002.safetensors")
    weights |= dict.fromkeys(two, "model-00002-of-00002.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return tmp_path


def test_a_model_is_loaded_from_a_directory_an_index_or_its_files(model):
    comm = SimulatedComm(LINE)
    files = sorted(model.glob("*.safetensors"))
    for path in (model, str(model), model / "model.safetensors.index.json", files):
        found = load_safetensors(path, LINE.layout(), comm)
        assert [*found] == [*checkpoint_contents(path)]
        assert sorted(found) == ["embed.weight", "head.bias", "head.weight", "scale"]
        assert torch.equal(found["head.bias"].full(), torch.arange(3.0))
    assert checkpoint_contents(files[0])["scale"] == Stored((), torch.float32)
    (model / "model.safetensors.index.json").unlink()
    assert len(checkpoint_contents(model)) == 4


def test_layouts_may_be_types_functions_and_tensors_in_nested_dicts(model):
    comm = SimulatedComm(LINE)
    like = {
        "embed": {"weight": TensorType((6, 2), torch.float32, LINE.layout("x"))},
        "head": lambda name, stored: LINE.layout(*[None] * (len(stored.shape) - 1), "x"),
        "scale": torch.zeros(()),
    }
    found = load_safetensors(model, like, comm)
    assert str(found["embed"]["weight"].type) == "f32[6@x,2]"
    assert {name: str(x.type) for name, x in found["head"].items()} == {
        "bias": "f32[3@x]",
        "weight": "f32[3,2@x]",
    }
    assert torch.equal(found["scale"], torch.tensor(2.0))
    again = load_safetensors(model, found, comm)
    assert again["embed"]["weight"].type is found["embed"]["weight"].type


def test_what_is_left_over_is_left_out_only_if_asked(model):
    comm = SimulatedComm(LINE)
    like = {"scale": LINE.layout()}
    assert [*load_safetensors(model, like, comm, strict=False)] == ["scale"]
    with pytest.raises(CheckpointError, match="3 left over"):
        load_safetensors(model, like, comm)


# --- writing ---------------------------------------------------------------------------------


def test_ranks_share_the_writing_by_bytes_and_an_index_says_who_wrote_what(tmp_path):
    layout = SQUARE.layout("dp")
    tree = {f"w{i}": spread(torch.full((8,), i), layout) for i in range(4)}
    tree |= {"big": spread(torch.ones(16, dtype=torch.int64), layout), "plain": torch.ones(1)}
    save_safetensors(tree, tmp_path, SimulatedComm(SQUARE))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * 64 + 128 + 4}
    found = load_safetensors(tmp_path, LINE.layout(), SimulatedComm(LINE))
    assert [*found] == [*index["weight_map"]]
    assert sorted(found) == sorted(tree)
    sizes = {}
    for name, file in index["weight_map"].items():
        sizes[file] = sizes.get(file, 0) + found[name].type.nbytes
    assert sorted(sizes.values()) == [64, 64 + 4, 128, 128]
    assert sorted(sizes) == [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]


def test_a_single_file_has_no_index(tmp_path):
    tree = {"a": spread(torch.arange(5), LINE.layout("x")), "b": torch.ones(1)}
    save_safetensors(tree, tmp_path / "deep" / "all.safetensors", SimulatedComm(LINE))
    assert torch.equal(load_file(tmp_path / "deep" / "all.safetensors")["a"], torch.arange(5))
    save_safetensors({"a": tree["a"]}, tmp_path / "dir", SimulatedComm(LINE))
    assert [file.name for file in (tmp_path / "dir").iterdir()] == ["model.safetensors"]
    save_safetensors({}, tmp_path / "none", SimulatedComm(LINE))
    assert load_safetensors(tmp_path / "none", LINE.layout(), SimulatedComm(LINE)) == {}


def test_parameters_that_share_memory_are_written_each(tmp_path):
    w = torch.nn.Parameter(torch.arange(4.0))
    save_safetensors({"a": w, "b": w}, tmp_path, SimulatedComm(Mesh(x=1)))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["b"], w)


def test_old_files_are_replaced_only_if_asked(model):
    comm = SimulatedComm(LINE)
    tree = {"a": spread(torch.arange(5), LINE.layout("x"))}
    with pytest.raises(CheckpointError) as raised:
        save_safetensors(tree, model, comm)
    assert str(raised.value) == ALREADY.format(path=model)
    save_safetensors(tree, model, comm, overwrite=True)
    assert [file.name for file in model.iterdir()] == ["model.safetensors"]


# --- mistakes --------------------------------------------------------------------------------


def refused(error, act, *args, **kwargs):
    with pytest.raises(error) as raised:
        act(*args, **kwargs)
    return str(raised.value)


def test_all_that_does_not_fit_is_told_at_once(model):
    like = {
        "embed.weights": LINE.layout("x"),
        "head": {"weight": TensorType((2, 3), torch.float32, LINE.layout())},
        "head.bias": LINE.layout(None, "x"),
        "scale": 2.0,
    }
    assert refused(CheckpointError, load_safetensors, model, like, SimulatedComm(LINE)) == MISFITS


def test_leaves_that_the_format_lacks_are_told_at_once(tmp_path):
    comm = SimulatedComm(LINE)
    tree = {
        "a": {"b": torch.ones(1)},
        "a.b": torch.ones(1),
        "step": 3,
        "z": spread(torch.zeros(2, dtype=torch.complex128), LINE.layout()),
    }
    assert refused(ValueTreeError, save_safetensors, tree, tmp_path, comm) == LACKS
    assert [*tmp_path.iterdir()] == []


def test_files_that_do_not_go_together_are_refused(model):
    comm, layout = SimulatedComm(LINE), LINE.layout()
    first, second = sorted(model.glob("*.safetensors"))
    nowhere = model / "no.safetensors"
    said = refused(CheckpointError, load_safetensors, nowhere, layout, comm)
    assert said.startswith(f"'{nowhere}' cannot be read: ")
    save_file({"scale": torch.ones(1)}, model / "more.safetensors")
    said = refused(CheckpointError, checkpoint_contents, [first, model / "more.safetensors"])
    assert said == TWICE.format(path=model)
    save_file({"head.bias": torch.ones(1)}, second)
    said = refused(CheckpointError, load_safetensors, model, layout, comm)
    assert said == NOT_OF_THE_INDEX.format(path=model)
    (model / "model.safetensors.index.json").write_text("{}")
    assert "is no index" in refused(CheckpointError, load_safetensors, model, layout, comm)
    (model / "other.safetensors.index.json").write_text("{}")
    said = refused(CheckpointError, load_safetensors, model, layout, comm)
    assert said.startswith(f"'{model}' has 3 safetensors files and 2 indices.")
    second.write_bytes(b"no header")
    said = refused(CheckpointError, load_safetensors, second, layout, comm)
    assert said.startswith(f"'{second}' cannot be read: ")


# --- on four ranks ---------------------------------------------------------------------------


@pytest.mark.mesh
@fewer
@given(anything.filter(lambda t: t.mesh.size <= 4), st.integers(0, 99))
def test_real_ranks_write_and_read_any_blocks(pool4, type, seed):
    def check(type, seed, path):
        comm = connect(Mesh(world=4))
        full = full_tensor(type, seed)
        blocks = dict(zip(type.mesh.ranks, scatter(full, type, seed), strict=True))
        nothing = torch.zeros((0,) * len(type.shape), dtype=type.dtype)
        x = DTensor(blocks.get(comm.rank, nothing), type, comm)
        save_safetensors({"x": x, "plain": torch.ones(2), "y": x}, path, comm)
        found = load_safetensors(path, {"x": type, "y": type.mesh.layout()}, comm, strict=False)
        return found["x"].local, found["y"].local

    with tempfile.TemporaryDirectory() as path:
        locals = pool4.run(check, type, seed, path)
    full = full_tensor(type, seed)
    assert torch.equal(gather_full([locals[r][0] for r in type.mesh.ranks], type), full)
    assert all(torch.equal(locals[rank][1], full) for rank in type.mesh.ranks)


@pytest.mark.mesh
def test_all_ranks_fail_where_one_does(pool4, model):
    def check(path):
        mesh = Mesh(x=4)
        comm = connect(mesh)
        x = distribute(torch.arange(5), mesh.layout("x"), comm)
        said = []
        for act in (
            lambda: load_safetensors(path if comm.rank != 1 else "no", mesh.layout(), comm),
            lambda: save_safetensors({"x": x if comm.rank else 1}, path / "new", comm),
            lambda: save_safetensors({"x": x, "y": x} if comm.rank else {"x": x}, path / "n", comm),
        ):
            try:
                act()
                said.append("")
            except FdtensorError as error:
                said.append(f"{type(error).__name__}: {error.sentence}")
        return said

    for rank, said in enumerate(pool4.run(check, model)):
        own = "CheckpointError: 'no' cannot be read"
        told = "CheckpointError: load_safetensors cannot start: rank 1: 'no' cannot be read"
        assert said[0].startswith(own if rank == 1 else told)
        own = "ValueTreeError: 1 of 1 leaves cannot be in"
        told = "CheckpointError: save_safetensors cannot start: rank 0: 1 of 1 leaves"
        assert said[1].startswith(own if rank == 0 else told)
        assert said[2] == "CommError: the ranks do not agree on save_safetensors."


# --- golden texts ----------------------------------------------------------------------------

ALREADY = """\
there are safetensors files at '{path}' already.

Save to another place, or pass overwrite=True."""

MISFITS = """\
what is asked of the files is not what is there: 1 missing, 3 wrong.

  missing: embed.weights (there is embed.weight)
  wrong:   head.weight is f32[3,2], asked for as f32[2,3]
           head.bias (f32[3]): mesh axis 'x' shards dim 1 of a tensor that has 1 dims
           scale is f32[], asked for as float

checkpoint_contents(path) prints what it holds."""

LACKS = """\
3 of 4 leaves cannot be in safetensors files.

  a.b:  is the name of two leaves
  step: is not a tensor: int
  z:    is c128[2]: safetensors files have no c128

Leave them out; save_checkpoint stores objects and any dtype."""

TWICE = """\
1 of the names in these files cannot be told.

  scale: is in {path}/model-00001-of-00002.safetensors and in {path}/more.safetensors

Name the files of one model, each once."""

NOT_OF_THE_INDEX = """\
1 of the names in these files cannot be told.

  head.weight: is not in {path}/model-00002-of-00002.safetensors, where the index has it

Name the files of one model, each once."""
