"""`initialize`: parameters in shards, with the numbers that one rank would draw."""

import math

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fdtensor import (
    Colwise,
    FdtensorError,
    Mesh,
    Rowwise,
    SimulatedComm,
    TraceError,
    ValueTreeError,
    connect,
    initialize,
    layouts_for,
    random,
)
from fdtensor.testing.strategies import layouts, meshes

KEY = random.key(5)
ONE = Mesh(one=1)
ALONE = SimulatedComm(ONE)
SQUARE = Mesh(dp=2, tp=2)
COMM = SimulatedComm(SQUARE)

few = settings(max_examples=max(3, settings.default.max_examples // 20))


class Net(nn.Module):
    """One of each way in which modules say what their tensors are."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.norm = nn.BatchNorm1d(8)
        self.words = nn.Embedding(5, 8, padding_idx=1)
        self.lstm = nn.LSTM(8, 4)
        self.head = nn.Linear(8, 5, bias=False)
        self.head.weight = self.words.weight
        self.both = nn.Sequential(self.head, self.head)


def meta(build):
    with torch.device("meta"):
        return build()


def alone(model):
    return {n: p.full() for n, p in initialize(model, {}, KEY, ALONE).items()}


NET = meta(Net)
WANTED = alone(NET)
NAMES = sorted(WANTED)
FIRST = dict.fromkeys(["head.weight", "both.0.weight", "both.1.weight"], "words.weight")


@few
@given(meshes(), st.data())
def test_parameters_do_not_know_how_they_are_sharded(mesh, data):
    some = data.draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=5))
    some = {FIRST.get(name, name) for name in some}
    laid = {
        name: data.draw(layouts(mesh, tuple(WANTED[name].shape), partial=False))
        for name in sorted(some)
    }
    found = initialize(NET, laid, KEY, SimulatedComm(mesh))
    assert sorted(found) == NAMES
    for name, layout in laid.items():
        assert found[name].layout == layout
    assert [n for n in NAMES if not torch.equal(found[n].full(), WANTED[n])] == []


def test_a_function_that_builds_the_model_draws_what_resets_draw():
    found = initialize(Net, SQUARE.layout(), KEY, COMM)
    assert [n for n in NAMES if not torch.equal(found[n].full(), WANTED[n])] == []


def test_what_modules_share_is_one_tensor():
    found = initialize(NET, {}, KEY, COMM)
    assert found["head.weight"] is found["words.weight"] is found["both.1.weight"]


def test_the_model_stays_as_it_was():
    before = dict(NET.named_parameters())
    initialize(NET, {}, KEY, COMM)
    assert all(before[n] is p and p.is_meta for n, p in NET.named_parameters())


def test_layouts_of_styles_and_a_step_with_them():
    model = meta(lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    laid = layouts_for(model, SQUARE, {"0": Colwise(), "2": Rowwise()}, axis="tp")
    found = initialize(model, laid, KEY, COMM)
    assert {n: p.layout for n, p in found.items()} == laid


def test_each_rank_draws_its_block_and_nothing_moves():
    shape, laid = (64, 32), SQUARE.layout("dp", "tp")
    before = COMM.received.total()
    drawn: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not hasattr(out, "fake_mode"):
                drawn.append(out.numel())
            return out

    model = meta(lambda: nn.Linear(shape[1], shape[0], bias=False))
    with Watch():
        initialize(model, {"weight": laid}, KEY, COMM)
    assert max(drawn) == 64 * 32 // 4
    assert COMM.received.total() == before


def scaled(kind, *args):
    return lambda x: scipy.stats.kstest(x.flatten().double().numpy(), kind, args).pvalue > 1e-3


LAWS = {
    "linear": (lambda: nn.Linear(100, 300), {"weight": ("uniform", -0.1, 0.2)}),
    "conv": (lambda: nn.Conv1d(25, 300, 4), {"weight": ("uniform", -0.1, 0.2)}),
    "embedding": (lambda: nn.Embedding(200, 50), {"weight": ("norm",)}),
    "lstm": (lambda: nn.LSTM(50, 100), {"weight_ih_l0": ("uniform", -0.1, 0.2)}),
    "attention": (
        lambda: nn.MultiheadAttention(50, 2),
        {"in_proj_weight": ("uniform", -math.sqrt(0.03), 2 * math.sqrt(0.03))},
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_parameters_have_the_distribution_that_their_module_asks_for(name):
    build, laws = LAWS[name]
    found = initialize(meta(build), SQUARE.layout(), KEY, COMM)
    for weight, law in laws.items():
        assert scaled(*law)(found[weight].full())


def test_a_module_without_parameters_to_reset_keeps_its_values():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.arange(6.0).reshape(2, 3))
            self.register_buffer("mask", torch.tensor([True, False]))

    found = initialize(Positions(), {"table": SQUARE.layout(None, "tp")}, KEY, COMM)
    assert torch.equal(found["table"].full(), torch.arange(6.0).reshape(2, 3))
    assert torch.equal(found["mask"].full(), torch.tensor([True, False]))


def test_any_pytree_of_tensors_may_be_made():
    def build():
        return {"a": [torch.randn(4, 4), torch.eye(3)], "b": nn.init.orthogonal_(torch.empty(4, 4))}

    laid = {"a": [SQUARE.layout("dp"), None], "b": SQUARE.layout("tp", "dp")}
    found = initialize(build, laid, KEY, COMM)
    assert found["a"][0].layout == laid["a"][0]
    square = found["b"].full()
    torch.testing.assert_close(square @ square.T, torch.eye(4))


def test_other_keys_other_numbers():
    found = initialize(NET, {}, random.key(6), COMM)
    assert not torch.equal(found["conv.weight"].full(), WANTED["conv.weight"])


def on_ranks():
    comm = connect(SQUARE)
    laid = {"words.weight": SQUARE.layout(None, ("tp", "dp")), "conv.bias": SQUARE.layout("dp")}
    found = initialize(meta(Net), laid, KEY, comm)
    return {n: p.full() for n, p in found.items()}


@pytest.mark.mesh
def test_real_ranks_draw_the_same(pool4):
    for found in pool4.run(on_ranks):
        assert [n for n in NAMES if not torch.equal(found[n], WANTED[n])] == []


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.arange(4.0))
        self.scale = nn.Parameter(torch.ones(3))


MISTAKES = {
    "empty": (
        TraceError,
        lambda: initialize(meta(Cached), {}, KEY, COMM),
        """\
nothing says what 2 of the tensors of Cached are at the start.

  tensors: cache, scale

Give their module a reset_parameters(), or pass a function that builds the model and returns it.""",
    ),
    "name": (
        ValueTreeError,
        lambda: initialize(NET, {"head.wait": SQUARE.layout()}, KEY, COMM),
        """\
the model has no tensor 'head.wait'.

  near head.wait: head.weight

Use the names of model.named_parameters() and model.named_buffers().""",
    ),
    "tied": (
        ValueTreeError,
        lambda: initialize(
            NET,
            {"head.weight": SQUARE.layout("dp"), "words.weight": SQUARE.layout()},
            KEY,
            COMM,
        ),
        """\
'head.weight' and 'words.weight' are one tensor, in two layouts.

  words.weight: (dp=R, tp=R)
  head.weight:  (dp=S(0), tp=R)

Give both the same layout.""",
    ),
    "no names": (
        ValueTreeError,
        lambda: initialize(NET, [SQUARE.layout()], KEY, COMM),
        """\
list has no layouts by name.

Pass a Layout, or a dict of them by the names of parameters and buffers.""",
    ),
    "no key": (
        FdtensorError,
        lambda: initialize(NET, {}, 5, COMM),
        """\
5 is not a key.

Make one: random.key(seed); a seed is an int.""",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_is_a_sentence_the_facts_and_what_to_do(name):
    kind, run, text = MISTAKES[name]
    with pytest.raises(kind) as error:
        run()
    assert str(error.value) == text
