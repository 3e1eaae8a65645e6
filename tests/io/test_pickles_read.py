"""Tests of pickles: values come back as torch reads them, and nothing else is made of a file."""

import collections
import datetime
import enum
import io
import json
import os
import pickle
import tracemalloc
import warnings

import attrs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import fdtensor as fd
from fdtensor.io.checkpoint.records import metadata_in
from fdtensor.io.pickles import Names, unpickled, value_of, values
from fdtensor.io.pickles.machine import BASE, TIMES
from fdtensor.io.pickles.values import DTYPES
from fdtensor.layouts.errors import CheckpointError
from fdtensor.layouts.mesh import Mesh
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.connect import distribute

LINE = Mesh(x=3)
COMM = SimulatedComm(LINE)


@attrs.frozen
class State:
    """A record of a user, with slots."""

    step: int
    names: tuple[str, ...]


class Plain:
    """A class of a user whose objects have a dict."""

    def __init__(self, rate):
        self.rate = rate

    def __eq__(self, other):
        return self.rate == other.rate

    __hash__ = None


class Mode(enum.Enum):
    FAST = "fast"


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return memoryview(bytearray(file.getvalue()))


def again(value, **options):
    data = saved(value)
    return value_of(data, what="x", size=len(data), **options)


# --- what comes back -------------------------------------------------------------------------

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float32, torch.Size([2, 0]), torch.device("cpu"), int])
)
PAIRS = st.tuples(st.integers(0, 3), st.text(max_size=2))
KEYS = st.text(max_size=3) | st.integers(-3, 300) | PAIRS
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(collections.OrderedDict)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
    ),
    max_leaves=10,
)


@given(VALUES, st.sampled_from([2, 3, 4, 5]))
def test_plain_values_come_back_in_every_protocol(value, protocol):
    assert text(again(value)) == text(torch.load(io.BytesIO(saved(value)), weights_only=False))
    if not any(word in repr(value) for word in UNLIKE):
        data = pickle.dumps(value, protocol=protocol)
        found, end = unpickled(data, _names(), what="x", size=len(data))
        assert (text(found), end) == (text(value), len(data))


UNLIKE = ("torch", "device", "class", "b'", 'b"', "j")
"""What repr shows of values whose pickles differ by protocol."""


def text(value) -> str:
    """The repr of a value, those of sets in order."""
    match value:
        case set() | frozenset():
            return f"{type(value).__name__} {sorted(map(text, value))}"
        case dict():
            return f"{type(value).__name__} {[(text(k), text(v)) for k, v in value.items()]}"
        case list() | tuple() if not isinstance(value, torch.Size):
            return f"{type(value).__name__} {[text(part) for part in value]}"
    return repr(value)


def _names():
    return values._PLAIN


TENSORS = {
    "transposed": torch.arange(6).view(2, 3).t(),
    "part": torch.arange(9)[2:5],
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "uint16": torch.ones(2).to(torch.uint16),
    "conjugate": (torch.ones(2) * 1j).conj(),
    "negative": (torch.ones(2) * 1j).conj().imag,
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(3.0),
    "expanded": torch.ones(1).expand(5),
    "bool": torch.tensor([True, False]),
    "half": torch.arange(3).bfloat16(),
    "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back(name):
    tensor, found = TENSORS[name], again((TENSORS[name],))[0]
    assert type(found) is type(tensor)
    assert found.dtype == tensor.dtype
    assert found.tolist() == tensor.tolist()


def test_what_a_module_saves_comes_back():
    state = torch.nn.BatchNorm1d(3).state_dict()
    found = again(state)
    assert found._metadata == state._metadata
    assert all(torch.equal(found[name], x) for name, x in state.items())
    counts = collections.Counter("abca")
    assert again([counts, collections.defaultdict(list, {1: [2]})])[0] == counts


def test_metadata_is_what_pickle_makes_of_it(tmp_path):
    x = distribute(torch.zeros(7, 3), LINE.layout("x"), COMM)
    fd.save_checkpoint({"a": {"x": x, "t": torch.ones(2).double()}, "step": 3}, tmp_path, COMM)
    data = (tmp_path / ".metadata").read_bytes()
    theirs = pickle.loads(data)
    ours, end = metadata_in(data, "x")
    assert data[end:].startswith(b"\nfdtensor saved=")
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_meta.save_id == theirs.storage_meta.save_id
    located = {(key.fqn, key.offset): info for key, info in ours.storage_data.items()}
    for index, info in theirs.storage_data.items():
        found = located[index.fqn, index.offset]
        assert attrs.asdict(found) == {"transform_descriptors": None, **vars(info)}
    for name, entry in theirs.state_dict_metadata.items():
        found = ours.state_dict_metadata[name]
        if name != "step":
            assert (found.size, found.properties.dtype) == (entry.size, entry.properties.dtype)
            chunks = [(c.offsets, c.sizes) for c in entry.chunks]
            assert [(c.offsets, c.sizes) for c in found.chunks] == chunks


# --- types of users --------------------------------------------------------------------------

THEIRS = [
    (State(3, ("a",)), (State,)),
    ([Plain(0.5)], (Plain,)),
    ([Mode.FAST], (Mode,)),
    (datetime.date(2020, 1, 2), (datetime.date,)),
]


@pytest.mark.parametrize(("value", "objects"), THEIRS, ids=lambda value: type(value).__name__)
def test_objects_are_made_of_types_that_were_opted_in(tmp_path, value, objects):
    fd.save_checkpoint({"s": value}, tmp_path, COMM)
    with pytest.raises(CheckpointError) as raised:
        fd.load_checkpoint(tmp_path, {"s": 0}, COMM)
    name = f"{objects[0].__module__}.{objects[0].__qualname__}"
    assert f"asks for {name}, which it may not have" in str(raised.value)
    assert "pass objects=(...)" in str(raised.value)
    assert fd.load_checkpoint(tmp_path, {"s": 0}, COMM, objects=objects) == {"s": value}


# --- what is refused -------------------------------------------------------------------------


class Evil:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", [2, 4])
def test_metadata_runs_nothing(tmp_path, protocol):
    canary = tmp_path / "canary"
    evil = Evil(os.system, f"touch {canary}")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(evil, protocol=protocol))
    with pytest.raises(CheckpointError) as raised:
        fd.io.checkpoint_contents(tmp_path)
    assert "asks for posix.system, which it may not have" in str(raised.value)
    with pytest.raises(CheckpointError):
        fd.load_checkpoint(tmp_path, {"x": LINE.layout()}, COMM)
    assert not canary.exists()


def test_objects_run_nothing(tmp_path):
    canary = tmp_path / "canary"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evil = Evil(os.system, f"touch {canary}")
        dcp.save({"s": evil}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(CheckpointError) as raised:
        fd.load_checkpoint(tmp_path / "c", {"s": 0}, COMM)
    assert "s in " in str(raised.value)
    assert "asks for posix.system" in str(raised.value)
    assert not canary.exists()


BOMBS = {
    "lists": b"]" * 10**6,
    "dicts": b"}" * 10**6,
    "sets": b"\x8f" * 10**6,
    "deep": b")" + b"\x85" * 10**6,
    "shared": b")" + b"2\x86" * 10**6,
    "marks": b"(" * 10**6,
    "wide": b"(" + b"N" * 10**6 + b"t",
    "bytes": b"\x8e" + (2**40).to_bytes(8, "little"),
    "text": b"\x8d" + (2**63).to_bytes(8, "little"),
    "number": b"\x8b" + (2**31 - 1).to_bytes(4, "little"),
    "memory": b"Nr" + (2**32 - 1).to_bytes(4, "little"),
    "key": b"}" + b")" + b"2\x86" * 100 + b"Ns",
    "deep key": b"}" + b")" + b"\x85" * 10**5 + b"Ns",
    "zeros": b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R",
    "persistent": b"NQ",
    "frame": b"\x95" + (2**63).to_bytes(8, "little"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_takes_no_more_than_ten_times_its_size(name):
    data = b"\x80\x04" + BOMBS[name] + b"."
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            unpickled(data, _names(), what="x", size=len(data))
        assert tracemalloc.get_traced_memory()[1] < TIMES * len(data) + BASE + 10_000
    finally:
        tracemalloc.stop()


def test_a_name_is_looked_up_in_the_table_alone():
    names = Names(DTYPES)
    assert unpickled(b"\x80\x02ctorch\nfloat32\n.", names, what="x", size=9)[0] is torch.float32
    for module, name in (("torch", "zeros"), ("torch", "Tensor.view"), ("builtins", "dict")):
        data = f"c{module}\n{name}\n.".encode()
        with pytest.raises(CheckpointError, match=f"x asks for {module}.{name}, which"):
            unpickled(data, names, what="x", size=9)


OUTSIDE = r"is not in its directory|is no name of a file"
PATHS = ["../x", "/etc/passwd", "a/../../x", "", "..", "a\0b", "..\\x"]


@pytest.mark.parametrize("path", PATHS)
def test_no_piece_is_outside_of_its_directory(tmp_path, path):
    fd.save_checkpoint({"x": torch.ones(2)}, tmp_path, COMM)
    data = (tmp_path / ".metadata").read_bytes().partition(b"\nfdtensor")[0]
    metadata = pickle.loads(data)
    for info in metadata.storage_data.values():
        info.relative_path = path
        del info.crc32
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=OUTSIDE):
        fd.load_checkpoint(tmp_path, {"x": torch.ones(2)}, COMM)


@pytest.mark.parametrize("path", PATHS)
def test_no_file_of_an_index_is_outside_of_its_directory(tmp_path, path):
    text = json.dumps({"weight_map": {"x": path}})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=OUTSIDE):
        fd.io.load_safetensors(tmp_path, {"x": LINE.layout()}, COMM)


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / ".metadata")
    os.mkfifo(tmp_path / "x.safetensors")
    for path in (tmp_path, tmp_path / "x.safetensors"):
        with pytest.raises(CheckpointError, match="it is no plain file"):
            fd.io.checkpoint_contents(path)


LIES = {
    "pieces twice": lambda m: m.state_dict_metadata["x"].chunks.append(
        m.state_dict_metadata["x"].chunks[0]
    ),
    "a shape too large": lambda m: setattr(
        m.state_dict_metadata["x"], "size", torch.Size([10**12, 10**5])
    ),
    "a piece too long": lambda m: [setattr(i, "length", 10**15) for i in m.storage_data.values()],
    "a piece beyond": lambda m: [setattr(i, "offset", 10**15) for i in m.storage_data.values()],
    "a place too far": lambda m: m.planner_data.update(x=("l", 10**9)),
    "no pieces": lambda m: m.storage_data.clear(),
    "another dtype": lambda m: setattr(
        m.state_dict_metadata["x"].properties, "dtype", torch.float64
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_lies_in_metadata_are_told_before_memory_is_taken(tmp_path, name):
    x = distribute(torch.arange(300), LINE.layout("x"), COMM)
    fd.save_checkpoint({"x": x}, tmp_path, COMM)
    data = (tmp_path / ".metadata").read_bytes()
    metadata = pickle.loads(data)
    LIES[name](metadata)
    for info in metadata.storage_data.values():
        del info.crc32
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError):
        fd.load_checkpoint(tmp_path, LINE.layout("x"), COMM)
