"""`shard_batches`: the batches of a loader, of which each rank reads its own rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fdtensor.io import shard_batches
from fdtensor.layouts.errors import ArgumentError, CommError, LayoutError, ValueTreeError
from fdtensor.layouts.mesh import Mesh
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.connect import connect
from fdtensor.testing.pool import WorkerError

few = settings(max_examples=settings.default.max_examples // 2)
MESH = Mesh(dp=2, sp=2)
COMM = SimulatedComm(MESH)


class Texts(Dataset):
    """Pairs of tokens and a label; it remembers what was read."""

    def __init__(self, count):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        self.read.append(i)
        return {"tokens": torch.arange(6) + 10 * i, "label": i}


def plain(batch):
    return {name: x.full() for name, x in batch.items()}


def loaded(count, size, **options):
    return DataLoader(Texts(count), batch_size=size, **options)


LAYOUTS = {"tokens": MESH.layout("dp", "sp"), "label": MESH.layout("dp")}


@few
@given(
    st.integers(0, 20), st.integers(1, 7), st.booleans(), st.integers(0, 3), st.sampled_from([0, 2])
)
def test_batches_are_those_of_the_loader(count, size, drop_last, prefetch, seed):
    loader = loaded(count, size, drop_last=drop_last)
    batches = shard_batches(loader, LAYOUTS, COMM, prefetch=prefetch, seed=seed)
    assert len(batches) == len(loader)
    if not count:
        return
    for _ in range(2):
        given_ = [*batches]
        assert len(given_) == len(loader)
        for batch, whole in zip(given_, loader, strict=True):
            assert batch["tokens"].layout is LAYOUTS["tokens"]
            for name, x in plain(batch).items():
                assert torch.equal(x, whole[name])
    assert batches.state_dict() == {"epoch": 2, "position": 0, "seed": seed}


def labels(batches):
    return [batch["label"].tolist() for batch in batches]


def test_shuffled_samples_are_in_another_order_each_epoch_and_the_same_for_a_seed():
    loader = loaded(12, 5, shuffle=True)
    batches = shard_batches(loader, LAYOUTS, COMM, seed=3)
    first, second = labels(batches), labels(batches)
    assert first != second
    for epoch in (first, second):
        assert sorted(i for batch in epoch for i in batch) == [*range(12)]
    again = shard_batches(loader, LAYOUTS, COMM, seed=3)
    assert [labels(again), labels(again)] == [first, second]
    assert labels(shard_batches(loader, LAYOUTS, COMM, seed=4)) != first


def test_a_sampler_of_its_own_says_which_samples_come():
    data = Texts(6)
    draws = torch.utils.data.RandomSampler(
        data, replacement=True, num_samples=9, generator=torch.Generator().manual_seed(2)
    )
    loader = DataLoader(data, batch_size=4, sampler=draws)
    drawn = labels(shard_batches(loader, LAYOUTS, COMM))
    assert [len(batch) for batch in drawn] == [4, 4, 1]
    assert len({i for batch in drawn for i in batch}) < 9
    backwards = DataLoader(data, batch_sampler=[[5, 4, 3], [2, 1], [0]])
    assert labels(shard_batches(backwards, LAYOUTS, COMM)) == [[5, 4, 3], [2, 1], [0]]


@few
@given(st.integers(1, 17), st.integers(1, 5), st.data())
def test_it_goes_on_where_another_one_was(count, size, data):
    loader = loaded(count, size, shuffle=True)
    whole = shard_batches(loader, LAYOUTS, COMM, seed=1)
    wanted = labels(whole) + labels(whole)
    stop = data.draw(st.integers(0, len(wanted) - 1))
    batches = shard_batches(loader, LAYOUTS, COMM, seed=1)
    seen = []
    while len(seen) < stop:
        for batch in batches:
            seen.append(batch["label"].tolist())
            if len(seen) == stop:
                break
    other = shard_batches(loader, LAYOUTS, SimulatedComm(Mesh(dp=2, sp=2)), seed=9)
    other.load_state_dict(batches.state_dict())
    while len(seen) < len(wanted):
        seen += labels(other)
    assert seen == wanted


def test_any_iterable_of_whole_batches():
    given_ = [{"x": torch.arange(4.0) * i, "name": "b"} for i in range(3)]
    batches = shard_batches(given_, MESH.layout("dp"), COMM)
    assert [batch["x"].tolist() for batch in batches] == [b["x"].tolist() for b in given_]
    batches.load_state_dict({"epoch": 0, "position": 2, "seed": 0})
    (last,) = batches
    assert (last["x"].tolist(), last["name"]) == (given_[2]["x"].tolist(), "b")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def test_streams_are_read_as_a_whole():
    batches = shard_batches(DataLoader(Stream(), batch_size=2), MESH.layout("dp"), COMM)
    assert [x.tolist() for x in batches] == [[0, 1], [2, 3], [4]]


def test_workers_read():
    batches = shard_batches(loaded(7, 3, num_workers=1), LAYOUTS, COMM)
    assert labels(batches) == [[0, 1, 2], [3, 4, 5], [6]]


class Ragged(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        if i == 3:
            raise ValueError("sample 3 cannot be read")
        return torch.zeros(2 + i // 2)


def test_mistakes_are_told():
    data = DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2)
    with pytest.raises(LayoutError, match=r"'dp' is not a Layout"):
        shard_batches(data, "dp", COMM)
    with pytest.raises(LayoutError, match="cannot be pending"):
        shard_batches(data, MESH.layout(partial={"dp": "sum"}), COMM)
    with pytest.raises(LayoutError, match="is no iterable of batches"):
        shard_batches(3, MESH.layout(), COMM)
    with pytest.raises(ValueTreeError, match="do not have the structure"):
        next(iter(shard_batches(data, {"x": MESH.layout()}, COMM)))
    ragged = shard_batches(DataLoader(Ragged(), batch_size=1), MESH.layout(), COMM)
    with pytest.raises(LayoutError, match=r"samples of shape \(3,\)"):
        list(ragged)
    with pytest.raises(ValueError, match="sample 3"):
        list(shard_batches(DataLoader(Ragged(), batch_size=2), MESH.layout(), COMM))


# --- real ranks -----------------------------------------------------------------------------------


def read_here(count, size, shuffle):
    comm = connect(MESH)
    loader = loaded(count, size, shuffle=shuffle)
    batches = shard_batches(loader, LAYOUTS, comm, seed=5)
    out = [plain(batch) for batch in batches]
    return out, loader.dataset.read[1:]  # the first is read to learn what samples are


@pytest.mark.mesh
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_rank_reads_its_own_rows(pool4, shuffle):
    ranks = pool4.run(read_here, 11, 4, shuffle)
    first, _ = ranks[0]
    assert [len(batch["label"]) for batch in first] == [4, 4, 3]
    for out, read in ranks:
        for batch, same in zip(out, first, strict=True):
            assert torch.equal(batch["tokens"], same["tokens"])
            assert torch.equal(batch["tokens"][:, 0], 10 * batch["label"])
        assert len(read) <= 6
    assert sorted({i for _, read in ranks for i in read}) == [*range(11)]


def fewer_than_ranks():
    out, _ = read_here(5, 4, False)
    return [x["label"].tolist() for x in out]


@pytest.mark.mesh
def test_a_last_batch_of_less_than_there_are_ranks(pool4):
    assert pool4.run(fewer_than_ranks) == [[[0, 1, 2, 3], [4]]] * 4


def other_seeds():
    comm = connect(MESH)
    list(shard_batches(loaded(8, 4, shuffle=True), LAYOUTS, comm, seed=comm.rank // 2))


def cannot_read():
    comm = connect(MESH)
    data = Ragged() if comm.rank == 3 else TensorDataset(torch.zeros(4, 2))
    loader = DataLoader(data, batch_size=2, collate_fn=lambda rows: torch.zeros(len(rows), 2))
    for batch in shard_batches(loader, MESH.layout("dp"), comm):
        batch.full()


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("body", "told"), [(other_seeds, "CommError"), (cannot_read, "sample 3 cannot be read")]
)
def test_ranks_that_differ_are_told_together(pool4, body, told):
    with pytest.raises(WorkerError, match=told):
        pool4.run(body)
    assert pool4.run(fewer_than_ranks) == [[[0, 1, 2, 3], [4]]] * 4


def test_an_empty_dataset_has_no_batches():
    empty = DataLoader(TensorDataset(torch.arange(0.0)), batch_size=3)
    assert list(shard_batches(empty, MESH.layout("dp"), COMM)) == []


COLLATES = {
    "two views of each": lambda some: torch.tensor([*some, *some]),
    "fewer": lambda some: torch.tensor([i for i in some if i != 3]),
    "a sum": lambda some: torch.tensor(some).sum(),
}


def one_row_for_each_sample(comm, collate):
    loader = DataLoader(range(1, 5), batch_size=4, collate_fn=COLLATES[collate])
    return [x.full() for x in shard_batches(loader, comm.mesh.layout("dp"), comm)]


@pytest.mark.parametrize("collate", COLLATES)
def test_a_batch_has_a_row_for_each_sample(collate):
    with pytest.raises(LayoutError, match="has not one row for each of"):
        one_row_for_each_sample(COMM, collate)


def refused_on_a_rank(collate):
    with pytest.raises((LayoutError, CommError), match="has not one row for each of"):
        one_row_for_each_sample(connect(Mesh(dp=2)), collate)


@pytest.mark.mesh
@pytest.mark.parametrize("collate", COLLATES)
def test_real_ranks_refuse_it_too(gloo_ranks, collate):
    gloo_ranks(2).run(refused_on_a_rank, collate, timeout=180)


@pytest.mark.parametrize(
    "state",
    [
        {"epoch": -1, "position": 0, "seed": 0},
        {"epoch": 0, "position": 1.5, "seed": 0},
        {"epoch": 0, "position": -1, "seed": 0},
        {"epoch": 0, "position": 99, "seed": 0},
        {"epoch": 0, "position": 0},
    ],
)
def test_what_is_no_state_of_batches_is_refused(state):
    batches = shard_batches(DataLoader(Texts(8), batch_size=4), MESH.layout("dp"), COMM)
    with pytest.raises(ArgumentError, match="state of"):
        batches.load_state_dict(state)
    assert batches.state_dict() == {"epoch": 0, "position": 0, "seed": 0}


def test_batches_whose_number_is_not_known_go_on_from_any_of_them():
    batches = shard_batches(DataLoader(Stream(), batch_size=2), MESH.layout("dp"), COMM)
    batches.load_state_dict({"epoch": 0, "position": 2, "seed": 0})
    assert [x.full().tolist() for x in batches] == [[4]]
