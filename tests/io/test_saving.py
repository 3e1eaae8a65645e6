"""Tests of saving: checksums, what is kept, and saves that go on while ranks compute."""

import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fdtensor as fd
from fdtensor.io.checkpoint import write
from fdtensor.layouts.errors import CheckpointError
from fdtensor.layouts.mesh import Mesh
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.connect import connect, distribute
from tests.io.test_checkpoint import torch_load

LINE = Mesh(x=3)
COMM = SimulatedComm(LINE)


def tree(number=0, size=30):
    x = torch.arange(size) + number
    return {"x": distribute(x, LINE.layout("x"), COMM), "step": number}


LIKE = {"x": LINE.layout(), "step": 0}


def steps(folder):
    return sorted(path.name for path in folder.iterdir())


# --- checksums -------------------------------------------------------------------------------


def test_one_flipped_bit_is_told_with_its_file_and_entry(tmp_path):
    fd.save_checkpoint(tree(), tmp_path, COMM)
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = data.find(torch.arange(10, 20).numpy().tobytes())
    data[at + 3] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointError) as raised:
        fd.load_checkpoint(tmp_path, LIKE, COMM)
    assert str(raised.value).startswith(f"x in {str(file)!r} is damaged: its checksum is not")
    assert fd.load_checkpoint(tmp_path, {"step": 0}, COMM, strict=False) == {"step": 0}


def test_torch_reads_what_has_checksums(tmp_path):
    fd.save_checkpoint(tree(3), tmp_path, COMM)
    found = torch_load(tmp_path, {"x": torch.zeros(30, dtype=torch.int64), "step": 0})
    assert torch.equal(found["x"], torch.arange(30) + 3)
    assert found["step"] == 3


# --- what is kept ----------------------------------------------------------------------------


def test_the_newest_are_kept_and_others_left_alone(tmp_path):
    for other in ("step_x", "best", "other_1"):
        fd.save_checkpoint(tree(), tmp_path / other, COMM)
    for number in range(4):
        fd.save_checkpoint(tree(number), tmp_path / f"step_{number:03}", COMM, keep=2)
    assert steps(tmp_path) == ["best", "other_1", "step_002", "step_003", "step_x"]
    assert fd.io.latest_checkpoint(tmp_path).name == "step_003"
    fd.save_checkpoint(tree(9), tmp_path / "step_001", COMM, keep=2)  # gone back, and on again
    assert steps(tmp_path)[2:] == ["step_001", "step_003", "step_x"]
    assert fd.io.latest_checkpoint(tmp_path, COMM).name == "step_001"


def test_the_latest_is_none_that_is_damaged_or_not_complete(tmp_path):
    assert fd.io.latest_checkpoint(tmp_path / "nowhere") is None
    for number in range(5):
        fd.save_checkpoint(tree(number), tmp_path / f"step_{number}", COMM)
    (tmp_path / "step_4" / ".metadata").unlink()
    (tmp_path / "step_3" / ".metadata").write_bytes(b"\x80\x04N.")
    next((tmp_path / "step_2").glob("*.distcp")).write_bytes(b"")
    assert fd.io.latest_checkpoint(tmp_path).name == "step_1"


def test_other_files_of_an_old_checkpoint_stay(tmp_path):
    for number in range(2):
        path = tmp_path / f"step_{number}"
        path.mkdir()
        (path / "notes.txt").write_text("mine")
        fd.save_checkpoint(tree(number), path, COMM, keep=1)
    assert steps(tmp_path / "step_0") == ["notes.txt"]
    assert (tmp_path / "step_1" / "notes.txt").exists()


@pytest.mark.parametrize(
    ("path", "keep", "said"),
    [
        ("best", 3, "has no number at its end, so keep=3 cannot tell which are older"),
        ("step_1", 0, "0 checkpoints cannot be kept"),
        ("step_1", True, "True checkpoints cannot be kept"),
    ],
)
def test_what_cannot_be_kept_is_told(tmp_path, path, keep, said):
    with pytest.raises(CheckpointError, match=said):
        fd.save_checkpoint(tree(), tmp_path / path, COMM, keep=keep)


# --- in the background -----------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
    """An event that writing waits for."""
    event, old = threading.Event(), write._write

    def slow(file, data):
        assert event.wait(60)
        return old(file, data)

    monkeypatch.setattr(write, "_write", slow)
    yield event
    event.set()


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path, gate):
    state, values = tree(5), [1, 2]
    saving = fd.save_checkpoint({**state, "values": values}, tmp_path / "c", COMM, wait=False)
    state["x"].local[0].zero_()
    values.append(3)
    assert not saving.done
    assert repr(saving).endswith("'), under way)".replace("')", "'"))
    assert fd.io.latest_checkpoint(tmp_path) is None
    gate.set()
    saving.wait()
    assert saving.done
    found = fd.load_checkpoint(tmp_path / "c", {**LIKE, "values": 0}, COMM)
    assert torch.equal(found["x"].full(), torch.arange(30) + 5)
    assert found["values"] == [1, 2]


def test_the_next_save_and_the_next_load_wait(tmp_path):
    for number in range(3):
        fd.save_checkpoint(tree(number), tmp_path / f"s_{number}", COMM, wait=False, keep=2)
    assert fd.load_checkpoint(tmp_path / "s_2", LIKE, COMM)["step"] == 2
    assert steps(tmp_path) == ["s_1", "s_2"]


def test_an_error_behind_is_raised_once_by_the_next_save_and_by_wait(tmp_path, monkeypatch):
    def full(file, data):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(write, "_write", full)
        saving = fd.save_checkpoint(tree(), tmp_path / "a", COMM, wait=False)
        saving._thread.join()
    with pytest.raises(CheckpointError) as raised:
        fd.save_checkpoint(tree(), tmp_path / "b", COMM)
    where = str(tmp_path / "a")
    assert str(raised.value).startswith(f"the checkpoint at {where!r} was not written.")
    assert "no space left" in str(raised.value)
    with pytest.raises(CheckpointError, match="was not written"):
        saving.wait()
    fd.save_checkpoint(tree(), tmp_path / "b", COMM)
    assert list((tmp_path / "a").iterdir()) == []


def test_python_does_not_end_before_a_save_does(tmp_path):
    source = f"""
import torch, fdtensor as fd
comm = fd.SimulatedComm(fd.Mesh(x=2))
fd.save_checkpoint({{"x": torch.arange(3_000_000)}}, {str(tmp_path)!r}, comm, wait=False)
"""
    subprocess.run([sys.executable, "-c", source], check=True)
    found = fd.load_checkpoint(tmp_path, {"x": torch.zeros(3_000_000, dtype=torch.int64)}, COMM)
    assert found["x"][-1] == 2_999_999


def test_a_writer_of_torch_cannot_write_behind(tmp_path):
    with pytest.raises(CheckpointError, match="FileSystemWriter cannot write in the background"):
        fd.save_checkpoint(tree(), dcp.FileSystemWriter(tmp_path), COMM, wait=False)


# --- on four ranks ---------------------------------------------------------------------------


@pytest.mark.mesh
def test_ranks_save_behind_and_fail_together(pool4, tmp_path):
    def check(path):
        from fdtensor.io.checkpoint import write

        comm = connect(Mesh(x=4))
        x = distribute(torch.arange(10), comm.mesh.layout("x"), comm)
        said, cut = [], x
        for number in range(4):
            saving = fd.save_checkpoint({"x": x}, path / f"s_{number}", comm, wait=False, keep=2)
            x = x.redistribute(comm.mesh.layout() if number % 2 else comm.mesh.layout("x"))
        saving.wait()
        said.append(fd.io.latest_checkpoint(path, comm).name)
        old = write._write

        def full(file, data):
            raise OSError("no space left")

        for wait in (True, False):
            write._write = full if comm.rank == 2 else old
            try:
                saving = fd.save_checkpoint({"x": cut}, path / "s_9", comm, wait=wait)
                if saving is not None:
                    saving.wait()
            except CheckpointError as error:
                said.append(str(error))
            write._write = old
        file = sorted((path / "s_3").glob("*.distcp"))[-1]
        if comm.rank == 0:
            file.write_bytes(file.read_bytes().replace(b"\x09", b"\x08"))
        torch.distributed.barrier()
        try:
            fd.load_checkpoint(path / "s_3", {"x": comm.mesh.layout("x")}, comm)
        except CheckpointError as error:
            said.append(error.sentence)
        return said

    told = pool4.run(check, tmp_path)
    for said in told:
        assert said[0] == "s_3"
        assert said[1:3] == [FAILED.format(path=tmp_path / "s_9")] * 2
        assert "x in " in said[3]
        assert "is damaged" in said[3]
    assert steps(tmp_path) == ["s_2", "s_3", "s_9"]
    assert steps(tmp_path / "s_9") == []


FAILED = """\
the checkpoint at '{path}' was not written.

  rank 2: OSError('no space left')

Mend what each rank says of itself, and try again."""
