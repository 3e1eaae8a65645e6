"""Tests of checkpoint: any blocks to files and back, beside torch's own state dicts."""

import shutil
import tempfile
import warnings
from math import prod

import attrs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fdtensor.io.checkpoint import (
    Contents,
    Stored,
    checkpoint_contents,
    load_checkpoint,
    save_checkpoint,
)
from fdtensor.io.checkpoint.boxes import bounding, rectangle, rectangles, shared, view
from fdtensor.io.checkpoint.names import joined, named, nested
from fdtensor.io.safetensors import load_safetensors, save_safetensors
from fdtensor.layouts.errors import CheckpointError, FdtensorError, ValueTreeError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Ragged, Replicate, Shard, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.random_bits import key, split
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.connect import connect, distribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.testing.strategies import redistributions, types
from fdtensor.testing.values import block, full_tensor, gather_full, scatter

R, S0 = Replicate(), Shard(0)
few = settings(max_examples=settings.default.max_examples // 2)
fewer = settings(max_examples=settings.default.max_examples // 8)

LINE, SQUARE = Mesh(x=3), Mesh(dp=2, tp=2)


def simulated(type, full, seed=0):
    """A DTensor of a type on its simulated mesh, its pending terms split at random."""
    return DTensor(scatter(full, type, seed), type, SimulatedComm(type.mesh))


def spread(tensor, layout):
    return distribute(tensor, layout, SimulatedComm(layout.mesh))


def torch_load(path, state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def torch_save(path, state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)


class Counting(dcp.FileSystemReader):
    """Reads a checkpoint, and keeps what was read."""

    def read_data(self, plan, planner):
        self.items = plan.items
        return super().read_data(plan, planner)


# --- names -----------------------------------------------------------------------------------

LEAVES = st.sampled_from([3, "text", None, 2.5, (1, 2), torch.zeros(1), torch.zeros(2, 1)])
KEYS = st.sampled_from(["w", "b", "layer.0", "momentum"]) | st.integers(0, 2)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.dictionaries(KEYS, inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["model", "optim"]), TREES))
def test_names_are_those_that_torch_gives_a_state_dict(tree):
    theirs, paths = flatten_state_dict(tree)
    ours, _ = named(tree)
    assert {leaf.name: leaf.path for leaf in ours} == paths
    assert all(leaf.value is theirs[leaf.name] for leaf in ours)


@given(st.dictionaries(st.sampled_from(["model", "optim"]), TREES))
def test_names_are_nested_again_as_torch_nests_them(tree):
    leaves, _ = named(tree)
    again = nested([(leaf.path, leaf.value) for leaf in leaves])
    assert repr(again) == repr(unflatten_state_dict(*flatten_state_dict(again)))
    expected = unflatten_state_dict(*flatten_state_dict(tree))
    assert {x.name: x.path for x in named(again)[0]} == {x.name: x.path for x in named(expected)[0]}


def test_tuples_are_split_only_where_they_hold_what_is_distributed():
    x = spread(torch.zeros(3), LINE.layout("x"))
    names = [
        leaf.name for leaf in named({"a": (1, torch.zeros(1)), "b": (x, {"c": [x]}), "d": x})[0]
    ]
    assert names == ["a", "b.0", "b.1.c.0", "d"]
    assert joined(("a", 0, "b")) == "a.0.b"


# --- rectangles ------------------------------------------------------------------------------


@given(types(partial=False))
def test_the_rectangles_of_a_block_hold_each_of_its_elements_once(type):
    full = torch.arange(type.numel).reshape(type.shape)
    for rank in type.mesh.ranks:
        box, local = type.box(type.mesh.coord(rank)), block(full, type, rank)
        pieces = [(piece, view(local, box, piece)) for piece in rectangles(box)]
        assert sum(v.numel() for _, v in pieces) == local.numel()
        for piece, v in pieces:
            assert torch.equal(v, full[tuple(slice(*ends) for ends in piece)])
            assert v.numel() == 0 or v.untyped_storage().data_ptr() == (
                local.untyped_storage().data_ptr()
            )


@given(types(partial=False), st.data())
def test_the_least_rectangle_has_all_that_blocks_share_with_a_piece(type, data):
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in type.shape]
    source = rectangle([a for a, _ in bounds], [b - a for a, b in bounds])
    both = [shared(type.box(type.mesh.coord(rank)), source) for rank in type.mesh.ranks]
    least = bounding(both)
    inside = [box for box in both if all(box)]
    assert (least is None) == (not inside)
    for d in range(len(type.shape)) if least else ():
        indices = {i for box in inside for held in box[d] for i in range(*held)}
        assert least[d] == ((min(indices), max(indices) + 1),)


# --- there and back --------------------------------------------------------------------------


@given(redistributions(cross_mesh=True, dtype=None), st.integers(0, 99))
def test_any_blocks_come_back_on_any_mesh(redistribution, seed):
    src, dst = redistribution
    full = full_tensor(src, seed)
    world = SimulatedComm(Mesh(world=8))
    with tempfile.TemporaryDirectory() as path:
        save_checkpoint({"x": simulated(src, full, seed)}, path, SimulatedComm(src.mesh))
        found = load_checkpoint(path, {"x": dst}, world)["x"]
    assert found.type is dst
    assert found.comm is world
    assert torch.equal(gather_full(found.local, dst), full)


@few
@given(types(), st.integers(0, 99))
def test_every_element_is_written_once_and_torch_reads_it(type, seed):
    full = full_tensor(type, seed)
    with tempfile.TemporaryDirectory() as path:
        save_checkpoint({"a": [{"x": simulated(type, full, seed)}]}, path, SimulatedComm(type.mesh))
        chunks = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["a.0.x"].chunks
        state = torch_load(path, {"a": [{"x": torch.full_like(full, 1)}]})
    assert sum(prod(chunk.sizes) for chunk in chunks) == type.numel
    assert len({tuple(chunk.offsets) for chunk in chunks}) == len(chunks)
    assert torch.equal(state["a"][0]["x"], full)


@few
@given(types(partial=False), st.integers(0, 99))
def test_what_torch_wrote_is_read_as_any_blocks(type, seed):
    full = full_tensor(type, seed)
    with tempfile.TemporaryDirectory() as path:
        torch_save(path, {"model": {"x": full}, "step": 3})
        like = {"model": {"x": type}, "step": None}
        found = load_checkpoint(path, like, SimulatedComm(type.mesh))
    assert found["step"] == 3
    assert torch.equal(gather_full(found["model"]["x"].local, type), full)


@pytest.fixture
def tree():
    """A state of a training job, on four simulated ranks."""
    return {
        "model": {
            "w": spread(torch.arange(30).reshape(6, 5), SQUARE.layout("tp", "dp")),
            "b": spread(torch.arange(5), Layout(SQUARE, [R, StridedShard(0, 2)])),
        },
        "optim": [{"m": torch.arange(3.0), "betas": (0.9, 0.99)}, {"params": [0, 1]}],
        "step": 7,
        "nothing": None,
    }


def test_a_whole_state_comes_back_as_it_was(tmp_path, tree):
    save_checkpoint(tree, tmp_path, SimulatedComm(SQUARE))
    found = load_checkpoint(tmp_path, tree, SimulatedComm(SQUARE))
    assert found["model"]["w"].type is tree["model"]["w"].type
    assert found["model"]["w"].comm is tree["model"]["w"].comm
    assert torch.equal(found["model"]["w"].full(), tree["model"]["w"].full())
    assert torch.equal(found["model"]["b"].full(), torch.arange(5))
    assert torch.equal(found["optim"][0].pop("m"), torch.arange(3.0))
    assert found["optim"] == [{"betas": (0.9, 0.99)}, {"params": [0, 1]}]
    assert (found["step"], found["nothing"]) == (7, None)


def test_torch_turns_it_into_a_file_of_its_own(tmp_path, tree):
    save_checkpoint(tree, tmp_path / "a", SimulatedComm(SQUARE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "a", tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt")
    assert torch.equal(found["model"]["w"], torch.arange(30).reshape(6, 5))
    assert torch.equal(found["model"]["b"], torch.arange(5))
    assert torch.equal(found["optim"][0]["m"], torch.arange(3.0))
    assert (found["optim"][1], found["step"]) == ({"params": [0, 1]}, 7)


def test_a_layout_stands_for_all_below_its_place(tmp_path, tree):
    save_checkpoint(tree, tmp_path, SimulatedComm(SQUARE))
    comm = SimulatedComm(LINE)
    like = {**tree, "model": LINE.layout("x"), "optim": LINE.layout("x")}
    found = load_checkpoint(tmp_path, like, comm)
    assert str(found["model"]["w"].type) == "i64[6@x,5]"
    assert str(found["optim"][0]["m"].type) == "f32[3@x]"
    assert found["optim"][1] == {"params": [0, 1]}
    whole = load_checkpoint(tmp_path, LINE.layout(), comm)
    assert torch.equal(whole["model"]["w"].local[2], torch.arange(30).reshape(6, 5))
    assert (whole["step"], whole["nothing"]) == (7, None)

    def last(name, stored):
        return LINE.layout(*[None] * (len(stored.shape) - 1), "x" if name != "model.b" else None)

    found = load_checkpoint(tmp_path, {"model": last}, comm, strict=False)
    assert {name: str(x.type) for name, x in found["model"].items()} == {
        "w": "i64[6,5@x]",
        "b": "i64[5]",
    }
    assert torch.equal(found["model"]["w"].full(), whole["model"]["w"].full())


def test_each_stored_piece_is_read_once_and_only_where_needed(tmp_path):
    full = torch.arange(32)
    save_checkpoint({"x": spread(full, Mesh(x=4).layout("x"))}, tmp_path, SimulatedComm(Mesh(x=4)))
    reader = Counting(tmp_path)
    strided = TensorType((32,), full.dtype, Layout(SQUARE, [StridedShard(0, 8), R]))
    found = load_checkpoint(reader, {"x": strided}, SimulatedComm(SQUARE))
    assert torch.equal(found["x"].full(), full)
    assert len(reader.items) == 4
    part = Layout(Mesh(x=1), [Ragged(0, (32,))])
    assert load_checkpoint(reader, {"x": part}, SimulatedComm(Mesh(x=1)))["x"].local[0][9] == 9


def test_loaded_tensors_are_new_and_blocks_are_filled_in_place(tmp_path):
    x = spread(torch.arange(4), LINE.layout())
    save_checkpoint({"x": x, "y": torch.ones(2)}, tmp_path, SimulatedComm(LINE))
    like = {"x": x, "y": torch.zeros(2)}
    found = load_checkpoint(tmp_path, like, SimulatedComm(LINE))
    assert len({local.data_ptr() for local in (*found["x"].local, *x.local)}) == 6
    assert torch.equal(found["y"], torch.ones(2))
    assert torch.equal(like["y"], torch.zeros(2))


def test_parameters_and_meta_tensors_say_what_a_plain_tensor_is_like(tmp_path):
    model = torch.nn.Linear(3, 2)
    save_checkpoint({"model": model.state_dict()}, tmp_path, SimulatedComm(LINE))
    with torch.device("meta"):
        like = {"model": dict(torch.nn.Linear(3, 2).named_parameters())}
    found = load_checkpoint(tmp_path, like, SimulatedComm(LINE))
    assert torch.equal(found["model"]["weight"], model.weight)
    assert found["model"]["bias"].device == torch.device("cpu")


def test_a_tensor_of_lazy_bits_is_stored_as_it_reads(tmp_path):
    z = torch.tensor([1 + 2j, 3j]).conj()
    type = TensorType((2,), z.dtype, LINE.layout())
    save_checkpoint(
        {"z": DTensor((z,) * 3, type, SimulatedComm(LINE))}, tmp_path, SimulatedComm(LINE)
    )
    assert torch.equal(torch_load(tmp_path, {"z": torch.zeros(2) * 1j})["z"], z)


def test_an_old_checkpoint_is_replaced_whole(tmp_path, tree):
    save_checkpoint(tree, tmp_path, SimulatedComm(SQUARE))
    (tmp_path / "__9_0.distcp").write_text("of a larger mesh")
    save_checkpoint({"w": torch.ones(1)}, tmp_path, SimulatedComm(LINE), overwrite=True)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert [name[:4] for name in names] == [".met", "__0_"]
    assert [*checkpoint_contents(tmp_path)] == ["w"]


# --- contents --------------------------------------------------------------------------------


def test_contents_are_a_mapping_and_print_as_a_table(tmp_path, tree):
    save_checkpoint(tree, tmp_path, SimulatedComm(SQUARE))
    contents = checkpoint_contents(tmp_path)
    assert contents["model.w"] == Stored((6, 5), torch.int64)
    assert contents["model.w"].nbytes == 240
    assert contents["step"] is None
    assert len(contents) == 7
    assert repr(contents) == CONTENTS
    assert repr(Contents({})) == "0 entries, 0 B of tensors"


# --- mistakes --------------------------------------------------------------------------------


def refused(error, act, *args, **kwargs):
    with pytest.raises(error) as raised:
        act(*args, **kwargs)
    return str(raised.value)


def test_all_that_does_not_fit_is_told_at_once(tmp_path, tree):
    save_checkpoint(tree, tmp_path, SimulatedComm(SQUARE))
    comm = SimulatedComm(LINE)
    like = {
        "model": {
            "bias": LINE.layout(),
            "w": TensorType((5, 6), torch.int64, LINE.layout()),
        },
        "optim": [{"betas": torch.zeros(3)}],
        "m": LINE.layout(),
        "head": LINE.layout(),
        "step": TensorType((), torch.int64, LINE.layout()),
        "nothing": 0,
    }
    assert refused(CheckpointError, load_checkpoint, tmp_path, like, comm) == MISFITS
    like = {
        "model": {"w": 3, "b": LINE.layout(None, "x")},
        "optim": [{"m": torch.zeros(3, dtype=torch.bfloat16)}],
        "extra": 1,
    }
    said = refused(CheckpointError, load_checkpoint, tmp_path, like, comm, strict=False)
    assert said == MISFITS_OF_SOME
    elsewhere = {"model": Mesh(x=4).layout()}
    said = refused(CheckpointError, load_checkpoint, tmp_path, elsewhere, comm, strict=False)
    assert "model.w (i64[6,5]): it uses rank 3, which this Comm does not have" in said
    said = refused(CheckpointError, load_checkpoint, tmp_path, lambda n, s: n, comm)
    assert "model.w has no layout: the function gave str" in said
    twice = {"model": LINE.layout(), "model.w": LINE.layout()}
    said = refused(CheckpointError, load_checkpoint, tmp_path, twice, comm, strict=False)
    assert "model.w is asked for twice" in said


def test_only_what_is_left_over_may_be_left_out(tmp_path, tree):
    save_checkpoint(tree, tmp_path, SimulatedComm(SQUARE))
    like = {"step": 0}
    assert "left over" in refused(
        CheckpointError, load_checkpoint, tmp_path, like, SimulatedComm(LINE)
    )
    assert load_checkpoint(tmp_path, like, SimulatedComm(LINE), strict=False) == {"step": 7}
    more = {**tree, "more": 1}
    said = refused(CheckpointError, load_checkpoint, tmp_path, more, SimulatedComm(SQUARE))
    assert said.endswith("checkpoint_contents(path) prints what it holds.")


def test_a_place_without_a_checkpoint_and_one_with_are_told(tmp_path, tree):
    comm = SimulatedComm(SQUARE)
    nowhere = tmp_path / "nowhere"
    said = refused(CheckpointError, load_checkpoint, nowhere, {}, comm)
    assert said == NOWHERE.format(path=nowhere)
    assert refused(CheckpointError, checkpoint_contents, nowhere) == said
    save_checkpoint(tree, tmp_path, comm)
    said = refused(CheckpointError, save_checkpoint, tree, tmp_path, comm)
    assert said == ALREADY.format(path=tmp_path)


def test_leaves_that_cannot_be_stored_are_told_at_once(tmp_path):
    comm = SimulatedComm(LINE)
    x = spread(torch.zeros(3), LINE.layout("x"))
    tree = {
        "a": {"b": 1},
        "a.b": 2,
        "layout": LINE.layout(),
        "model": torch.nn.Linear(1, 1),
        "odd": attrs.evolve(x, local=x.local[:2]),
    }
    said = refused(ValueTreeError, save_checkpoint, tree, tmp_path / "no", comm)
    assert said == UNFIT
    assert not (tmp_path / "no").exists()
    said = refused(ValueTreeError, save_checkpoint, x, tmp_path, comm)
    assert "  tree: has no name: pass a dict\n" in said


def test_an_object_that_cannot_be_pickled_leaves_no_checkpoint(tmp_path):
    said = refused(
        CheckpointError, save_checkpoint, {"f": (lambda: 0)}, tmp_path, SimulatedComm(LINE)
    )
    assert said.startswith(f"the checkpoint at {str(tmp_path)!r} was not written.\n\n  rank 0: ")
    assert not (tmp_path / ".metadata").exists()


def test_a_checkpoint_with_holes_is_refused(tmp_path):
    class Forgets(dcp.FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            metadata = super().read_metadata(*args, **kwargs)
            metadata.state_dict_metadata["x"].chunks.pop()
            return metadata

    comm = SimulatedComm(LINE)
    save_checkpoint({"x": spread(torch.arange(6), LINE.layout("x"))}, tmp_path, comm)
    said = refused(CheckpointError, load_checkpoint, Forgets(tmp_path), {"x": LINE.layout()}, comm)
    assert said == HOLES


def test_a_file_that_is_cut_off_is_an_error_of_ours(tmp_path):
    comm = SimulatedComm(LINE)
    save_checkpoint({"x": spread(torch.arange(600), LINE.layout("x"))}, tmp_path, comm)
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(b"")
    said = refused(CheckpointError, load_checkpoint, tmp_path, {"x": LINE.layout()}, comm)
    assert said.startswith(f"{str(file)!r} has 0 bytes, which is less than")


# --- on four ranks ---------------------------------------------------------------------------


def move_on_ranks(src, dst, seed, path):
    comm = connect(Mesh(world=4))
    full, rank = full_tensor(src, seed), comm.rank
    blocks = dict(zip(src.mesh.ranks, scatter(full, src, seed), strict=True))
    local = blocks.get(rank, torch.zeros((0,) * len(src.shape), dtype=src.dtype))
    save_checkpoint({"x": DTensor(local, src, comm), "step": 3}, path, comm)
    found = load_checkpoint(path, {"x": dst, "step": 0}, comm)
    assert found["step"] == 3
    return found["x"].local


@pytest.mark.mesh
@fewer
@given(redistributions(world=4, cross_mesh=True), st.integers(0, 99))
def test_real_ranks_write_and_read_any_blocks(pool4, redistribution, seed):
    src, dst = redistribution
    with tempfile.TemporaryDirectory() as path:
        locals = pool4.run(move_on_ranks, src, dst, seed, path)
        chunks = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["x"].chunks
    assert torch.equal(
        gather_full([locals[r] for r in dst.mesh.ranks], dst), full_tensor(src, seed)
    )
    assert sum(prod(chunk.sizes) for chunk in chunks) == src.numel


@pytest.mark.mesh
def test_replicas_share_the_writing_and_ranks_read_only_their_pieces(pool4, tmp_path):
    def check(path):
        comm = connect(Mesh(x=4))
        tree = {f"w{i}": distribute(torch.arange(64), Mesh(x=4).layout(), comm) for i in range(8)}
        tree["cut"] = distribute(torch.arange(8), Mesh(x=4).layout("x"), comm)
        save_checkpoint(tree, path, comm)
        reader = Counting(path)
        pair = Layout(Mesh.from_ranks([2, 1], "x"), [S0])
        like = {**{name: Layout(pair.mesh, [R]) for name in tree}, "cut": pair}
        like["w0"] = Layout(SQUARE, [StridedShard(0, 8), R])
        found = load_checkpoint(reader, like, comm)
        assert found["w0"].local.tolist() == [*found["w0"].type.index(comm.rank)[0]]
        return found["cut"].local, len([i for i in reader.items if i.dest_index.fqn == "cut"])

    found = pool4.run(check, tmp_path)
    assert [(local.tolist(), items) for local, items in found] == [
        ([], 0),
        ([4, 5, 6, 7], 2),
        ([0, 1, 2, 3], 2),
        ([], 0),
    ]
    storage = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    files = [info.relative_path for index, info in storage.items() if index.fqn != "cut"]
    assert len(files) == 8
    assert {files.count(file) for file in files} == {2}


@pytest.mark.mesh
def test_a_comm_of_some_ranks_leaves_the_others_alone(pool4, tmp_path):
    def check(path):
        mesh = Mesh.from_ranks([3, 1], "x")
        comm = connect(mesh)
        x = distribute(torch.arange(5), mesh.layout("x"), comm)
        if comm.rank in mesh.ranks:
            save_checkpoint({"x": x}, path, comm)
            return load_checkpoint(path, {"x": mesh.layout()}, comm)["x"].local.tolist()
        return None

    assert pool4.run(check, tmp_path) == [None, [0, 1, 2, 3, 4], None, [0, 1, 2, 3, 4]]


@pytest.mark.mesh
def test_all_ranks_fail_where_one_does(pool4, tmp_path):
    def check(path):
        comm = connect(Mesh(x=4))
        x = distribute(torch.arange(5), Mesh(x=4).layout("x"), comm)
        odd = attrs.evolve(x, local=x.local[:0]) if comm.rank == 2 else x
        said = []
        for act in (
            lambda: save_checkpoint({"x": odd}, path, comm),
            lambda: save_checkpoint({"x": x}, path, comm),
            lambda: load_checkpoint(path if comm.rank else path / "no", {"x": x}, comm),
            lambda: load_checkpoint(path, {"x": x} if comm.rank != 3 else {"y": x}, comm),
            lambda: save_checkpoint({"x": x, "f": (lambda: 0)}, path, comm, overwrite=True),
        ):
            try:
                act()
                said.append("")
            except FdtensorError as error:
                said.append(f"{type(error).__name__}: {error.sentence}")
        return said

    found = pool4.run(check, tmp_path)
    for rank, said in enumerate(found):
        assert said[0].startswith("ValueTreeError: 1 of 1 leaves" if rank == 2 else ONE_ALONE)
        assert said[1] == ""
        assert said[2].startswith("CheckpointError: there is no" if rank == 0 else NO_FILES)
        assert "is not what is there" in said[3]
        assert ("rank 3" in said[3]) == (rank != 3)
        assert said[4].startswith("CheckpointError: the checkpoint at")


@pytest.mark.mesh
def test_paths_that_differ_by_rank_are_listed(pool4, tmp_path):
    def check(path):
        comm = connect(Mesh(x=4))
        x = {"x": distribute(torch.arange(5), Mesh(x=4).layout("x"), comm)}
        own = path / f"of_{comm.rank % 2}"
        own.mkdir(exist_ok=True)
        said = []
        for act in (
            lambda: save_checkpoint(x, own, comm),
            lambda: save_safetensors(x, own, comm),
            lambda: load_checkpoint(own, x, comm),
            lambda: load_safetensors(own, {"x": x["x"].layout}, comm),
            lambda: save_checkpoint(x, path, comm),
        ):
            try:
                act()
                said.append(None)
            except CheckpointError as error:
                said.append((error.sentence, error.facts, error.hint))
        copies = path / f"copy_{comm.rank}"
        shutil.copytree(path, copies, ignore=shutil.ignore_patterns("copy_*"))
        back = load_checkpoint(copies, x, comm)["x"]  # each machine may have its own copy
        return said, torch.equal(back.full(), torch.arange(5))

    for said, is_same in pool4.run(check, tmp_path):
        assert is_same
        *failed, last = said
        assert last is None
        for about, (sentence, facts, hint) in zip(
            ("checkpoint", "safetensors"), failed, strict=False
        ):
            assert sentence == f"save_{about}: ranks gave different paths."
            assert facts == {f"rank {i}": repr(str(tmp_path / f"of_{i}")) for i in (0, 1)}
            assert "make a temporary one on one rank" in hint
        for _, facts, hint in failed[2:]:
            assert facts["rank 1"] == repr(str(tmp_path / "of_1"))
            assert hint.startswith("Ranks gave different paths.")


@pytest.mark.mesh
def test_state_dicts_of_torch_and_ours_are_interchangeable(pool4, tmp_path):
    def check(path):
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        from tests.support.device_meshes import init_device_mesh

        torch.manual_seed(0)

        def make():
            return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 5))

        plain, model = make(), make()
        model.load_state_dict(plain.state_dict())
        device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        styles = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, device_mesh["tp"], styles)
        fully_shard(model, mesh=device_mesh["dp"])

        dcp.save({"model": model.state_dict(), "step": 5}, checkpoint_id=path / "theirs")
        mesh = Mesh.from_ranks([3, 0, 2], "x")
        comm = connect(Mesh(world=4))
        like = {"model": mesh.layout("x"), "step": 0}
        ours = load_checkpoint(path / "theirs", like, comm)
        assert ours["step"] == 5
        for name, tensor in plain.state_dict().items():
            if comm.rank != 1:
                assert torch.equal(ours["model"][name].full(), tensor)
            else:
                ours["model"][name].full()

        ours["model"] = {
            name: x.redistribute(Layout(Mesh(a=2, b=2), [R, S0]))
            for name, x in ours["model"].items()
        }
        doubled = {n: attrs.evolve(x, local=x.local * 2) for n, x in ours["model"].items()}
        save_checkpoint({"model": doubled, "step": 6}, path / "ours", comm)
        state = {"model": model.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=path / "ours")
        model.load_state_dict(state["model"])
        assert state["step"] == 6
        for name, tensor in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name].full_tensor(), 2 * tensor)

    pool4.run(check, tmp_path)


@pytest.mark.mesh
def test_tensors_on_a_sub_mesh_of_each_rank_are_stored_once(pool4, tmp_path):
    def check(path):
        from torch.distributed.tensor import Shard, distribute_tensor

        from fdtensor.io.interop import from_torch
        from tests.support.device_meshes import init_device_mesh

        device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        full = torch.arange(15.0).view(5, 3)
        theirs = distribute_tensor(full, device_mesh["tp"], [Shard(0)])
        tree = {"w": from_torch(theirs)}
        comm = connect(Mesh(world=4))
        save_checkpoint({**tree, "theirs": theirs}, path, comm)
        chunks = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["w"].chunks
        assert sum(prod(chunk.sizes) for chunk in chunks) == 15
        with pytest.raises(CheckpointError) as raised:
            load_checkpoint(path, {**tree, "theirs": theirs}, comm)
        assert "theirs is asked for as torch's DTensor: pass a layout" in str(raised.value)
        like = {**tree, "theirs": comm.mesh.layout("world")}
        found = load_checkpoint(path, like, comm)
        assert torch.equal(found.pop("theirs").full(), full)
        found = found["w"]
        assert found.type is tree["w"].type
        assert torch.equal(found.local, tree["w"].local)

    pool4.run(check, tmp_path)


# --- golden texts ----------------------------------------------------------------------------

CONTENTS = """\
model.b         i64[5]
model.w         i64[6,5]
nothing         object
optim.0.betas   object
optim.0.m       f32[3]
optim.1.params  object
step            object
7 entries, 292 B of tensors"""

MISFITS = """\
what is asked of the checkpoint is not what is there: 3 missing, 3 wrong, 1 left over.

  missing:   head
             m (there is optim.0.m)
             model.bias (there is model.b)
  wrong:     model.w is i64[6,5], asked for as i64[5,6]
             optim.0.betas is an object, asked for as f32[3]
             step is an object, asked for as i64[]
  left over: optim.1.params

checkpoint_contents(path) prints what it holds; strict=False leaves the rest out."""

MISFITS_OF_SOME = """\
what is asked of the checkpoint is not what is there: 1 missing, 3 wrong.

  missing: extra
  wrong:   model.b (i64[5]): mesh axis 'x' shards dim 1 of a tensor that has 1 dims
           model.w is i64[6,5], asked for as int
           optim.0.m is f32[3], asked for as bf16[3]

checkpoint_contents(path) prints what it holds."""

NOWHERE = """\
there is no checkpoint at '{path}'.

A checkpoint is a directory with a file .metadata, which is written last; load_safetensors reads \
safetensors files."""

ALREADY = """\
there is a checkpoint at '{path}' already.

Save to another directory, or pass overwrite=True."""

UNFIT = """\
4 of 5 leaves cannot be stored.

  a.b:    is the name of ('a', 'b') and of ('a.b',)
  layout: is a Layout, not a value
  model:  is a Linear: pass its state_dict()
  odd:    a simulated value is a tuple of 3 tensors, one a rank, not a tuple of 2

A leaf is a DTensor, a tensor or an object that can be pickled."""

HOLES = """\
x is stored in part: 4 of 6 elements are there.

  stored: i64[6]

Write the checkpoint again: some rank had not written its pieces."""

ONE_ALONE = "CheckpointError: save_checkpoint cannot start: rank 2: 1 of 1 leaves cannot be stored"
NO_FILES = "CheckpointError: load_checkpoint cannot start: rank 0: there is no checkpoint at"


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64, torch.float64, torch.int16])
@pytest.mark.parametrize("before", [1, 3, 4])
def test_a_block_is_read_from_wherever_it_lies_in_a_file(tmp_path, dtype, before):
    mesh = Mesh(x=2)
    comm = SimulatedComm(mesh)
    tree = {"a": torch.ones(before, dtype=torch.uint8), "b": torch.arange(6).to(dtype)}
    save_checkpoint(tree, tmp_path / "saved", comm)
    loaded = load_checkpoint(tmp_path / "saved", mesh.layout("x"), comm)
    assert torch.equal(loaded["b"].full(), tree["b"])


def test_one_layout_for_all_loads_numbers_whole(tmp_path):
    mesh = Mesh(x=2)
    comm, rows = SimulatedComm(mesh), mesh.layout("x")
    state = {"w": torch.ones(4), "of_w": {"step": torch.tensor(3.0), "average": torch.zeros(4)}}
    save_checkpoint(distribute(state, rows, comm), tmp_path / "a", comm)
    for wanted in (rows, {"w": rows, "of_w": rows}):
        loaded = load_checkpoint(tmp_path / "a", wanted, comm)
        assert loaded["of_w"]["step"].item() == 3
        assert loaded["of_w"]["average"].layout is rows
    with pytest.raises(CheckpointError, match="1 wrong"):
        load_checkpoint(tmp_path / "a", {**wanted, "of_w": {"step": rows, "average": rows}}, comm)


def test_names_that_lead_to_a_value_and_to_others_are_refused_for_one_layout(tmp_path):
    mesh = Mesh(x=2)
    comm, rows = SimulatedComm(mesh), mesh.layout("x")
    x = distribute(torch.arange(4), rows, comm)
    save_checkpoint({"r": {0: x, "0": {"a": x}}}, tmp_path / "a", comm)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(tmp_path / "a", rows, comm)
    assert str(error.value) == (
        "a checkpoint has a value and a dict in one place.\n\n  place: r.0\n  below: a\n\n"
        "Dicts with keys such as 0 and '0' are so: load by a pytree like the saved one."
    )
    like = {"r": {0: rows, "0": {"a": rows}}}
    assert load_checkpoint(tmp_path / "a", like, comm)["r"]["0"]["a"].full().equal(x.full())


def test_random_keys_are_stored_as_their_words(tmp_path):
    """In a dict, a list and a tuple; torch reads them as tensors."""
    comm = SimulatedComm(LINE)
    first, second = split(key(3))
    tree = {"key": key((1 << 63) + 5), "chains": (first, {"at": second}), "all": [first, None]}
    save_checkpoint(tree, tmp_path, comm)
    other = key(0)
    like = {"key": other, "chains": (other, {"at": other}), "all": [other, None]}
    assert load_checkpoint(tmp_path, like, comm) == tree
    names = ["all.0", "all.1", "chains.0", "chains.1.at", "key"]
    assert list(checkpoint_contents(tmp_path)) == names
    theirs = torch_load(tmp_path, {"key": torch.zeros(2, dtype=torch.int64)})
    assert theirs["key"].tolist() == [1 << 31, 5]
    loaded = load_checkpoint(tmp_path, LINE.layout(), comm)
    assert loaded["key"].full().tolist() == [1 << 31, 5]


def test_safetensors_files_have_random_keys_too(tmp_path):
    comm = SimulatedComm(LINE)
    save_safetensors({"w": torch.ones(2), "key": key(7)}, tmp_path, comm)
    with pytest.raises(CheckpointError, match=r"key is i64\[2\], asked for as f32\[2\]"):
        load_safetensors(tmp_path, {"w": torch.ones(2), "key": torch.ones(2)}, comm)
    assert load_safetensors(tmp_path, {"w": torch.ones(2), "key": key(0)}, comm)["key"] == key(7)
