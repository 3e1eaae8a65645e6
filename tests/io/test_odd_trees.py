"""What trees may hold besides dicts of tensors, and what the names and places of files may be."""

import dataclasses
from typing import Any

import pytest
import torch

from fdtensor import (
    CheckpointError,
    Mesh,
    SimulatedComm,
    ValueTreeError,
    connect,
    distribute,
)
from fdtensor.io import checkpoint_contents, load_checkpoint, load_safetensors, save_safetensors
from fdtensor.io import save_checkpoint as save

MESH = Mesh(x=2)
COMM = connect(MESH)
X = distribute(torch.arange(4.0), MESH.layout("x"), COMM)


@dataclasses.dataclass
class State:
    """A state of training."""

    weight: Any
    step: int


def test_the_fields_of_a_dataclass_with_a_dtensor_are_entries(tmp_path):
    """Whether or not the process has met the class before."""
    save({"state": State(X, 3), "plain": State(torch.ones(2), 4)}, tmp_path, COMM)
    assert sorted(checkpoint_contents(tmp_path)) == ["plain", "state.step", "state.weight"]
    wanted = {"state": State(MESH.layout("x"), 0), "plain": State(torch.zeros(2), 0)}
    loaded = load_checkpoint(tmp_path, wanted, COMM, objects=(State,))
    assert loaded["state"].step == 3
    assert loaded["state"].weight.full().tolist() == [0, 1, 2, 3]
    assert loaded["plain"].weight.tolist() == [1, 1]


class Holder:
    """An object of some class."""

    def __init__(self, weight):
        self.weight = weight


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Holder(X), "a Holder that holds a DTensor"),
        ({X}, "a set that holds a DTensor"),
        (torch.eye(3).to_sparse(), "a tensor without plain memory: cpu, torch.sparse_coo"),
        (torch.ones(3, device="meta"), "a tensor without plain memory: meta"),
    ],
    ids=["object", "set", "sparse", "meta"],
)
def test_what_could_not_be_loaded_is_not_saved(value, words, tmp_path):
    with pytest.raises(ValueTreeError, match=words) as said:
        save({"good": X, "bad": value}, tmp_path / "here", COMM)
    assert [*said.value.facts] == ["bad"]
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("wait", [True, False])
def test_an_object_that_has_no_pickle_is_named(wait, tmp_path):
    with pytest.raises(CheckpointError, match="'bad' cannot be pickled"):
        save({"good": X, "bad": lambda: 1}, tmp_path / "here", COMM, wait=wait)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64, torch.float64, torch.int8])
def test_any_strides_at_any_place_of_a_file(dtype, tmp_path):
    values = torch.arange(60).reshape(3, 4, 5).to(dtype)
    tree = {f"odd {i}": torch.ones(i, dtype=torch.uint8) for i in range(1, 4)}
    tree |= {"one": values.flatten()[::7][:1], "last": values[:1, ::5, ::5], "none": values[:0]}
    tree |= {"turned": values.mT[::2], "spread": values[:, 1:2].expand(3, 4, 5)}
    tree["ours"] = distribute(values.mT, MESH.layout(None, "x"), COMM)
    save(tree, tmp_path, COMM)
    for name, x in load_checkpoint(tmp_path, MESH.layout(), COMM).items():
        known = tree[name]
        assert torch.equal(x.full(), known.full() if name == "ours" else known), name


@pytest.mark.parametrize("count", [1533, 4000])
def test_a_safetensors_file_of_many_small_tensors(count, tmp_path):
    file = tmp_path / "many.safetensors"
    save_safetensors({f"k{i}": torch.tensor([i]) for i in range(count)}, file, COMM)
    loaded = load_safetensors(file, MESH.layout(), COMM)
    assert [loaded[f"k{i}"].local[1].item() for i in (0, count // 2, count - 1)] == [
        0,
        count // 2,
        count - 1,
    ]


def test_the_files_of_others_stay_where_they_are(tmp_path):
    theirs = tmp_path / "adapter.safetensors"
    save_safetensors({"q": torch.ones(1)}, theirs, COMM)
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match="safetensors files"):
            save_safetensors({"x": X}, tmp_path, COMM, overwrite=overwrite)
    assert [*tmp_path.iterdir()] == [theirs]
    theirs.unlink()
    for _ in range(2):
        save_safetensors({"x": X}, tmp_path, COMM, overwrite=True)
    assert load_safetensors(tmp_path, {"x": X}, COMM)["x"].full().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_no_file_can_have_is_refused(name, tmp_path):
    with pytest.raises(ValueTreeError, match="is no name that a safetensors file can have"):
        save_safetensors({name: torch.ones(1), "x": X}, tmp_path, COMM)


def test_a_safetensors_save_that_fails_leaves_nothing(tmp_path):
    directory = tmp_path / "x.safetensors"
    directory.mkdir()
    with pytest.raises(CheckpointError, match="is a directory, but its name is that of a file"):
        save_safetensors({"x": X}, directory, COMM, overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        save_safetensors({"x": X}, tmp_path / "file" / "x.safetensors", COMM)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["file", "x.safetensors"]


def test_a_comm_of_some_of_the_ranks_of_a_tensor_saves_it(tmp_path):
    whole = SimulatedComm(Mesh(all=4))
    x = distribute(torch.arange(8), whole.mesh.layout("all"), whole)
    save_safetensors({"x": x}, tmp_path, SimulatedComm(Mesh.from_ranks([0, 1], "some")))
    assert load_safetensors(tmp_path, MESH.layout(), COMM)["x"].full().tolist() == [*range(8)]
