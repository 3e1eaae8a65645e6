"""Python values, the order of dicts and one DTensor given twice: what a program is made for."""

import dataclasses
import functools
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fdtensor import Mesh, SimulatedComm, call, distribute, random, spmd
from fdtensor.errors import FallbackWarning
from fdtensor.tensors.calls import again
from fdtensor.tensors.calls.reads import Reads

MESH = Mesh(b=3)
COMM = SimulatedComm(MESH)
X = distribute(torch.tensor([1.0, 2, 3]), MESH.layout("b"), COMM)
Y = distribute(torch.tensor([10.0, 20, 30]), MESH.layout("b"), COMM)


def by_place(values):
    return [value * (i + 1) for i, value in enumerate(values)]


def fulls(results):
    return [t.full().tolist() for t in results]


@pytest.mark.parametrize(
    "f",
    [
        lambda tree: by_place(tree.values()),
        lambda tree: by_place({"in": tree}["in"].values()),
    ],
)
def test_the_order_of_a_dict_is_that_of_the_call(f):
    g = spmd(f)
    assert fulls(g({"a": X, "b": Y})) == [[1, 2, 3], [20, 40, 60]]
    assert fulls(g({"b": Y, "a": X})) == [[10, 20, 30], [2, 4, 6]]
    assert fulls(g({"a": X, "b": Y})) == [[1, 2, 3], [20, 40, 60]]
    assert len(g.programs) == 2


def test_the_order_of_keywords_is_that_of_the_call():
    g = spmd(lambda **named: by_place(named.values()))
    g(p=X, q=Y)
    assert fulls(g(q=Y, p=X)) == [[10, 20, 30], [2, 4, 6]]


def written(x, y):
    x.add_(1)
    return y * 2


@pytest.mark.parametrize("way", [spmd(written), functools.partial(call, written)])
def test_a_write_shows_where_the_same_tensor_is_given_again(way):
    assert way(X, X).full().tolist() == [4, 6, 8]
    assert way(X, Y).full().tolist() == [20, 40, 60]
    assert way(X, X).full().tolist() == [4, 6, 8]
    assert X.full().tolist() == [1, 2, 3]


def test_derivatives_of_a_tensor_that_is_given_twice_add_up():
    leaf = torch.tensor([1.0, 2, 3], requires_grad=True)
    x = distribute(leaf, MESH.layout("b"), COMM)
    spmd(lambda a, b: (a * b * b).sum())(x, x).full().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3, 12, 27]


@dataclasses.dataclass
class Settings:
    factor: float


class Plain:
    def __init__(self, factor):
        self.factor = factor


class Slots:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor


class Table(dict):
    @property
    def factor(self):
        return self["factor"]

    @factor.setter
    def factor(self, value):
        self["factor"] = value


class Scaling(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor


@pytest.mark.parametrize(
    "kind", [Settings, Plain, Slots, Scaling, lambda factor: Table(factor=factor)]
)
def test_attributes_of_an_argument_count(kind):
    given, g = kind(2), spmd(lambda x, s: x * s.factor)
    assert g(X, given).full().tolist() == [2, 4, 6]
    given.factor = 5
    assert g(X, given).full().tolist() == [5, 10, 15]
    g(X, given)
    assert len(g.programs) == 2


def test_the_numbers_of_an_array_count():
    given, g = np.array([2.0]), spmd(lambda x, a: x * float(a[0]))
    g(X, given)
    given[0] = 4
    assert g(X, given).full().tolist() == [4, 8, 12]


FACTOR = 2
TABLE = {"factor": [2]}


def helper(x):
    return x * 2


def by_a_global(x):
    return x * FACTOR


def by_a_table(x):
    return x * TABLE["factor"][0]


def by_a_helper(x):
    return helper(x)


def other_helper(x):
    return x * 3


@pytest.mark.parametrize("way", [lambda f: spmd(f), lambda f: functools.partial(call, f)])
@pytest.mark.parametrize(
    ("f", "name", "value"),
    [
        (by_a_global, "FACTOR", 3),
        (by_a_table, "TABLE", {"factor": [3]}),
        (by_a_helper, "helper", other_helper),
    ],
)
def test_what_a_function_reads_by_name_counts(f, name, value, way, monkeypatch):
    g = way(f)
    assert g(X).full().tolist() == [2, 4, 6]
    monkeypatch.setitem(globals(), name, value)
    assert g(X).full().tolist() == [3, 6, 9]


def test_what_is_in_a_closure_counts():
    factor, weight = 2, torch.ones(3)
    g = spmd(lambda x: x * factor * weight)
    assert g(X).full().tolist() == [2, 4, 6]
    factor = 3
    assert g(X).full().tolist() == [3, 6, 9]
    weight = torch.full((3,), 2.0)
    assert g(X).full().tolist() == [6, 12, 18]
    weight += 1  # read afresh, by the same program
    assert g(X).full().tolist() == [9, 18, 27]
    assert len(g.programs) == 3


def test_whether_a_module_is_in_training_counts():
    norm = torch.nn.BatchNorm1d(1, affine=False).eval()
    x = distribute(torch.tensor([[1.0], [2], [3]]), MESH.layout("b"), COMM)
    buffers = {k: distribute(v, MESH.layout(), COMM) for k, v in norm.named_buffers()}
    g = spmd(lambda x, b: torch.func.functional_call(norm, b, (x,)))
    assert torch.allclose(g(x, buffers).full().flatten(), torch.tensor([1.0, 2, 3]), atol=1e-4)
    norm.train()
    got = g(x, buffers).full().flatten()
    assert torch.allclose(got, torch.tensor([-1.2247, 0, 1.2247]), atol=1e-4)


class Trainer:
    def __init__(self):
        self.step = 0

    def loss(self, x):
        return (x * x).sum()


def test_an_object_that_counts_its_steps_makes_no_other_program():
    trainer = Trainer()
    g = spmd(trainer.loss)
    for _ in range(3):
        g(X)
        trainer.step += 1
    assert len(g.programs) == 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: object


class Pair(NamedTuple):
    value: object


class Sizes(dict):
    pass


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Frozen(1), Frozen(1.0)),
        (Frozen(0.0), Frozen(-0.0)),
        (Frozen(True), Frozen(1)),
        (Frozen([1]), Frozen([2])),
        (Pair(1), Pair(1.0)),
        (complex(2, -0.0), complex(2, 0.0)),
        (complex(-0.0, 2), complex(0.0, 2)),
        (Decimal("1"), Decimal("1.0")),
        ({1: 2}, {1.0: 2}),
        (Sizes(a=1), Sizes(a=2)),
        (bytearray(b"a"), bytearray(b"b")),
        (np.float64(0.0), np.float64(-0.0)),
        ([Frozen(1)], [Frozen(1.0)]),
    ],
)
@pytest.mark.parametrize("where", ["argument", "closure", "default"])
def test_equal_values_that_differ_make_two_programs(first, second, where):
    now = first
    if where == "argument":
        g = spmd(lambda x, v: x * 1)
        run = lambda v: g(X, v)  # noqa: E731
    else:

        def closing(x):
            return x * (now is None or 1)

        def by_default(x, v=None):
            return x * 1

        f = closing if where == "closure" else by_default
        g = spmd(f)

        def run(v):
            nonlocal now
            now, by_default.__defaults__ = v, (v,)
            return g(X)

    for value in (first, second, first, second):
        run(value)
    assert len(g.programs) == 2


def test_a_global_that_comes_later_counts():
    g = spmd(by_a_late_global)
    try:
        for factor in (2, 3):
            globals()["LATE"] = factor
            assert g(X).full().tolist() == [factor, 2 * factor, 3 * factor]
    finally:
        del globals()["LATE"]


def by_a_late_global(x):
    return x * LATE  # noqa: F821


def test_the_tensors_of_a_module_are_those_that_it_has_now():
    layer = torch.nn.Linear(1, 1, bias=False)
    g = spmd(lambda x: layer(x[:, None])[:, 0])
    for factor in (2.0, 3.0):
        layer.load_state_dict({"weight": torch.tensor([[factor]])}, assign=True)
        layer.requires_grad_(False)
        assert g(X).full().tolist() == [factor, 2 * factor, 3 * factor]
    layer.weight.fill_(5)
    assert g(X).full().tolist() == [5, 10, 15]
    assert len(g.programs) == 2


def test_an_array_that_a_function_reads_counts():
    table = np.array([2.0])
    g = spmd(lambda x: x * float(table[0]))
    assert g(X).full().tolist() == [2, 4, 6]
    table[0] = 4
    assert g(X).full().tolist() == [4, 8, 12]


def test_objects_that_hold_each_other_end():
    a, b = Plain(2), Plain(3)
    a.other, b.other = b, a
    g = spmd(lambda x, s: x * s.factor)
    assert g(X, a).full().tolist() == [2, 4, 6]


def test_functions_of_torch_read_nothing_that_varies_but_what_they_are_around():
    scale = 2.0

    def scaled(x):
        return (scale * x).sum()

    assert not Reads(F.layer_norm)
    assert not Reads(torch.einsum)
    gradient = torch.func.grad(scaled)
    around = Reads(gradient)
    before = around.key()
    scale = 3.0
    assert around.key() != before


def test_a_value_that_changes_at_each_call_is_told_once(monkeypatch):
    monkeypatch.setattr(again, "TIMES", 3)
    comm = SimulatedComm(Mesh(x=2))
    x = distribute(torch.ones(4), Mesh(x=2).layout("x"), comm)
    f = spmd(lambda x, k, scale=1.0: x * scale + random.normal(k, (4,)))
    keys = random.split(random.key(0), 6)
    f(x, keys[0])
    f(x, keys[1])
    with pytest.warns(
        FallbackWarning, match=r"each value of a random key, so far for 3.*key\.tensor"
    ):
        f(x, keys[2])
    f(x, keys[3])
    f(x, keys[0], scale=2.0)
    f(x, keys[0], scale=3.0)
    with pytest.warns(FallbackWarning, match=r"argument \['scale'\], so far for 3.*torch\.tensor"):
        f(x, keys[0], scale=4.0)
    f(x, keys[0], scale=5.0)


def test_sizes_that_change_are_told_with_their_dims(monkeypatch):
    monkeypatch.setattr(again, "TIMES", 3)
    comm = SimulatedComm(Mesh(x=2))

    def called(f, *shapes):
        return f(*[distribute(torch.ones(n), comm.mesh.layout("x"), comm) for n in shapes])

    f = spmd(lambda x, y: (x.sum() + y.sum(0)).sum())
    for shapes in ((4, 2), (4,)), ((6, 2), (4,)), ((6, 3), (4,)), ((6,), (4,)):
        called(f, *shapes)  # no three that differ in the same dims
    with pytest.warns(FallbackWarning, match="each size of argument 0 in dim 0, so far for 3"):
        called(f, (8, 2), (4,))
    called(f, (10, 2), (4,))
    with pytest.warns(FallbackWarning, match="of argument 0 in dim 0 and argument 1 in dim 0, so"):
        called(f, (12, 2), (6,))
    called(f, (14, 2), (8,))
    g = spmd(lambda x, y: (x.sum() + y.sum(0)).sum(), dynamic={"x": 0})
    for n in range(4, 16, 2):
        called(g, (n, 2), (4,))


def test_a_value_that_changes_is_told_early_where_recording_takes_long(monkeypatch):
    monkeypatch.setattr(again, "LONG", 0.0)
    comm = SimulatedComm(Mesh(x=2))
    x = distribute(torch.ones(4), Mesh(x=2).layout("x"), comm)
    f = spmd(lambda x, rate: x * rate)
    for rate in (0.1, 0.2, 0.3):
        f(x, rate)
    with pytest.warns(FallbackWarning, match=r"of argument 1, so far for 4 in \d+ s\. A tensor"):
        f(x, 0.4)
    f(x, 0.5)
