"""What ranks claim to hold alike is compared before it is written: replicas and plain values."""

import tempfile
import warnings

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdtensor.io.checkpoint import load_checkpoint, save_checkpoint
from fdtensor.layouts.errors import CheckpointError
from fdtensor.layouts.mesh import Mesh
from fdtensor.runtime.fingerprint import COLUMNS, fingerprint
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.connect import connect, distribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.grad_norms import local_tensors
from fdtensor.testing.strategies import types
from fdtensor.testing.values import full_tensor, scatter

few = settings(max_examples=settings.default.max_examples // 2)


# --- fingerprints ----------------------------------------------------------------------------

SIZES = st.sampled_from([1, 7, 8, 9, 8 * COLUMNS - 1, 8 * COLUMNS, 16 * COLUMNS + 3])


@few
@given(SIZES, st.data())
def test_a_bit_more_is_another_fingerprint(size, data):
    x = torch.randint(
        256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)
    )
    y = x.clone()
    for place in data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=2)):
        y[place] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint(x) == fingerprint(x.clone())
    assert fingerprint(x) != fingerprint(y)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_the_same_bits_have_one_fingerprint_however_they_lie(dtype):
    x = torch.arange(3 * 5 * 7).reshape(3, 5, 7).to(dtype)
    odd = torch.zeros(x.numel() + 1, dtype=dtype)[1:].view(x.shape)
    odd.copy_(x)
    apart = x.mT.contiguous().mT
    assert fingerprint(x) == fingerprint(odd) == fingerprint(apart)
    assert fingerprint(x) != fingerprint(x.mT.contiguous())
    assert fingerprint(x) != fingerprint(x.view(5, 3, 7))


VALUES = [0, 0.0, -0.0, 1, True, None, "1", b"1", (1,), [1], {1}, {"a": 1, "b": 2}, torch.zeros(())]


def test_other_values_have_other_fingerprints_and_order_is_that_of_the_value():
    assert len(set(map(fingerprint, VALUES))) == len(VALUES)
    assert fingerprint({"b": 2, "a": 1}) == fingerprint({"a": 1, "b": 2})
    assert fingerprint({"x", "y", "z"}) == fingerprint({"z", "y", "x"})
    assert fingerprint(float("nan")) == fingerprint(float("nan"))


# --- replicas --------------------------------------------------------------------------------


@few
@given(types(partial=False), st.data())
def test_a_replica_that_differs_is_refused_and_what_one_rank_alone_holds_is_not(type, data):
    full = full_tensor(type, 0)
    held = scatter(full, type, 0)
    comm = SimulatedComm(type.mesh)
    place = data.draw(st.integers(0, type.mesh.size - 1))
    rank = type.mesh.order[place]
    if held[place].numel():
        byte = held[place].reshape(-1).view(torch.uint8)
        byte[data.draw(st.integers(0, byte.numel() - 1))] ^= 1
    replicated = any(
        str(p) == "R" and n > 1 for p, n in zip(type.layout.placements, type.mesh.sizes)
    )
    with tempfile.TemporaryDirectory() as path:
        tree = {"x": DTensor(held, type, comm)}
        if not replicated or not held[place].numel():
            save_checkpoint(tree, path, comm)
            return
        with pytest.raises(CheckpointError) as error:
            save_checkpoint(tree, path, comm)
        assert f"rank {rank}" in error.value.facts["x"]
        save_checkpoint(tree, path, comm, on_difference="ignore")


def test_the_text_of_a_difference():
    mesh = Mesh(x=4)
    comm = SimulatedComm(mesh)
    x = distribute(torch.zeros(2), mesh.layout(), comm)
    drifted = attrs.evolve(x, local=(*x.local[:3], x.local[3] + 1))
    with tempfile.TemporaryDirectory() as path:
        with pytest.raises(CheckpointError) as error:
            save_checkpoint({"a": x, "b": drifted}, path, comm)
        assert str(error.value) == TEXT
        with pytest.warns(UserWarning, match="1 of 2 entries are not the same"):
            save_checkpoint({"a": x, "b": drifted}, path, comm, on_difference="warn")
        assert load_checkpoint(path, {"a": x, "b": x}, comm)["b"].full().tolist() == [0, 0]


# --- real ranks ------------------------------------------------------------------------------


@pytest.mark.mesh
def test_the_state_of_an_optimizer_on_blocks_is_refused_on_all_ranks(pool4, tmp_path):
    def check(path):
        mesh = Mesh(dp=2, tp=2)
        comm = connect(mesh)
        x = distribute(torch.arange(8.0), mesh.layout("tp"), comm).detach().requires_grad_()
        optimizer = torch.optim.AdamW(local_tensors([x]))
        x.local.grad = x.local.detach().clone()
        optimizer.step()
        tree = {"model": x.detach(), "optim": optimizer.state_dict(), "step": comm.rank // 3}
        try:
            save_checkpoint(tree, path / "first", comm)
        except CheckpointError as error:
            said = error.sentence, dict(error.facts)
        own = {f"rng.{comm.rank}": torch.ones(2) * comm.rank, "step": 3, "model": x.detach()}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save_checkpoint(own, path / "second", comm)
            save_checkpoint(tree, path / "third", comm, on_difference="ignore")
        wanted = {"rng.2": torch.zeros(2)}
        loaded = load_checkpoint(path / "second", wanted, comm, strict=False)
        return said, loaded["rng.2"].tolist()

    for (sentence, facts), rng in pool4.run(check, tmp_path):
        assert sentence.startswith("3 of 17 entries are not the same on all ranks")
        assert facts == {
            "optim.state.0.exp_avg": "ranks 0, 2 | ranks 1, 3",
            "optim.state.0.exp_avg_sq": "ranks 0, 2 | ranks 1, 3",
            "step": "ranks 0-2 | rank 3",
        }
        assert rng == [2.0, 2.0]


@pytest.mark.mesh
def test_replicas_that_drifted_are_refused_on_all_ranks(pool4, tmp_path):
    def check(path):
        mesh = Mesh(dp=2, tp=2)
        comm = connect(mesh)
        x = distribute(torch.arange(8.0), mesh.layout("tp"), comm)
        save_checkpoint({"x": x, "y": x}, path, comm)
        drifted = attrs.evolve(x, local=x.local + (comm.rank == 3))
        try:
            save_checkpoint({"x": x, "y": drifted}, path, comm, overwrite=True)
        except CheckpointError as error:
            return dict(error.facts)

    assert pool4.run(check, tmp_path) == [{"y": "rank 1 | rank 3"}] * 4


TEXT = """\
1 of 2 entries are not the same on all ranks that have them, and one rank's would be kept.

  b: ranks 0-2 | rank 3

Distribute what each rank has a part of (the state of fdtensor.optim is), name what each has of \
its own by rank, or keep one with on_difference="ignore"."""


@pytest.mark.mesh
@pytest.mark.parametrize("cut", ["s", None])
def test_one_name_for_tensors_of_two_meshes_is_refused(pool4, tmp_path, cut):
    """As the stages of a pipeline, each with a tree of its own."""

    def check(path):
        comm = connect(Mesh(all=4))
        meshes = Mesh.from_ranks([0, 1], "s"), Mesh.from_ranks([2, 3], "s")
        mine = meshes[comm.rank // 2]
        a, b = (distribute(torch.full((4,), i), m.layout(cut), comm) for i, m in enumerate(meshes))
        own = {"w": a if comm.rank < 2 else b, "same": a}
        mixed = {"w": a if comm.rank < 2 else torch.ones(4)}
        said = []
        for tree in (own, mixed):
            try:
                save_checkpoint(tree, path / "first", comm)
            except CheckpointError as error:
                said.append(dict(error.facts))
        save_checkpoint(own, path / "kept", comm, on_difference="ignore")
        same = distribute(torch.full((4,), 0), mine.layout(cut), comm)
        save_checkpoint({f"stage {mine.order}": own["w"], "same": same}, path / "second", comm)
        loaded = load_checkpoint(path / "second", comm.mesh.layout(), comm)
        return said, sorted(x.full().tolist() for x in loaded.values())

    for said, loaded in pool4.run(check, tmp_path):
        (own,), (mixed,) = (facts.items() for facts in said)
        assert own[0] == mixed[0] == "w"
        assert mixed[1].startswith("ranks 0-1 | ranks 2-3")
        blocks = [f"rank {i} | rank {i + 2}, and 1 other blocks" for i in range(2)]
        assert own[1] in (blocks if cut else ["ranks 0-1 | ranks 2-3"])
        assert loaded == [[0] * 4, [0] * 4, [1] * 4]
