"""What a function reads besides its arguments: where it is another one, another program is made."""

import array
import collections
import dataclasses
import datetime
import functools
import gc
import sys
import types
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdtensor import FallbackWarning, Mesh, SimulatedComm, call, distribute, spmd
from fdtensor.tensors.calls import again
from fdtensor.tensors.calls.code_reads import chains_in
from fdtensor.tensors.calls.reads import Reads

MESH = Mesh(x=2)
COMM = SimulatedComm(MESH)


def cut(*values):
    return distribute(torch.tensor(values), MESH.layout("x"), COMM)


X = cut(0, 0)


def value_of(result):
    return int(result.full()[0])


class Config:
    scale = 1

    def __init__(self, scale=2):
        self.own = scale

    @property
    def worked_out(self):
        return self.own * FACTOR

    @functools.cached_property
    def kept(self):
        return self.own + 1

    @classmethod
    def of_class(cls):
        return cls.scale

    @staticmethod
    def of_none():
        return FACTOR

    def __call__(self, x):
        return x + self.own * FACTOR

    def add(self, x):
        return x + self.own


class Slots:
    __slots__ = ("own",)

    def __init__(self):
        self.own = 2


class Trainer:
    def __init__(self):
        self.rate, self.config, self.weight = 2, Config(), cut(1, 2)
        self.parts = [Config(3), Config(4)]

    def step(self, x):
        return x + self.rate + self.config.own

    def by_helper(self, x):
        return self.step(x) + sum([p.own for p in self.parts])

    def inner(self, x):
        return (lambda y: y + self.config.own)(x)

    def by_local(self, x):
        config = self.config
        return x + config.own

    def weighed(self, x):
        return x + self.weight

    def by_name(self, x):
        return x + getattr(self, "rate")  # noqa: B009

    def counted(self, x):
        self.rate += 1
        return x + self.rate


class Inheriting(Trainer):
    def step(self, x):
        return super().step(x)


class Net(torch.nn.Module):
    factor = 1

    def __init__(self):
        super().__init__()
        self.config, self.weight = SimpleNamespace(scale=2), cut(1, 1)

    def forward(self, x):
        return x * self.config.scale + self.factor * FACTOR


FACTOR = 3


def helper(x):
    return x + FACTOR


def further(x):
    return helper(x)


def twice(x):
    return further(x) + helper(x)


CONFIG = Config()


def of_global(x):
    return x + CONFIG.own


def same_as_plain(f, change, *args, times=1):
    """The results before and after a change are those of the function itself."""
    ways = [spmd(f), functools.partial(call, f)]
    plain = [a.full() if hasattr(a, "full") else a for a in args]
    for _ in range(times + 1):
        wanted = int(f(torch.zeros(2, dtype=torch.int64), *plain)[0])
        assert [value_of(way(X, *args)) for way in ways] == [wanted] * 2
        change()


def attribute(value, name, by=7):
    return lambda: setattr(value, name, getattr(value, name) + by)


@pytest.mark.parametrize("name", ["step", "by_helper", "inner", "by_local", "by_name"])
@pytest.mark.parametrize("kind", [Trainer, Inheriting])
def test_attributes_of_the_object_of_a_method_count(kind, name):
    trainer = kind()
    f = getattr(trainer, name)
    same_as_plain(f, attribute(trainer, "rate"))
    same_as_plain(f, attribute(trainer.config, "own"))
    same_as_plain(f, attribute(trainer.parts[1], "own"))
    same_as_plain(f, lambda: setattr(trainer, "config", Config(9)))


def test_a_tensor_that_an_object_holds_is_read_anew_without_another_recording():
    trainer = Trainer()
    g = spmd(trainer.weighed)
    for value in (1, 5, 9):
        trainer.weight = cut(value, value)
        assert value_of(g(X)) == value
    assert len(g.programs) == 1
    trainer.weight = distribute(torch.tensor([3, 3]), MESH.layout(), COMM)
    assert value_of(g(X)) == 3
    assert len(g.programs) == 2


def test_a_tensor_that_an_object_passes_on_is_read_anew_too():
    @dataclasses.dataclass(frozen=True)
    class State:
        weight: object
        more: dict

    def add(x, state):
        return x + state.weight + state.more["w"]

    state = State(cut(1, 1), {"w": cut(2, 2)})
    g = spmd(lambda x: add(x, state))
    assert value_of(g(X)) == 3
    state = State(cut(3, 3), {"w": cut(4, 4)})
    assert value_of(g(X)) == 7
    assert len(g.programs) == 1


@pytest.mark.parametrize("kind", [Trainer, Inheriting])
def test_what_is_not_read_makes_no_other_program(kind):
    trainer = kind()
    for name in ("weighed", "step"):
        g = spmd(getattr(trainer, name))
        g(X)
        trainer.other = name
        trainer.parts.append(0)
        g(X)
        assert len(g.programs) == 1


def test_super_counts_where_it_has_another_method(monkeypatch):
    trainer = Inheriting()
    f = trainer.step
    same_as_plain(f, lambda: monkeypatch.setattr(Trainer, "step", lambda self, x: x - self.rate))
    same_as_plain(f, attribute(trainer, "rate"))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x + CONFIG.own,
        lambda x: x + CONFIG.worked_out,
        lambda x: x + CONFIG.of_class() + CONFIG.own,
        lambda x: [x + CONFIG.own for _ in range(2)][1],
        of_global,
        lambda x: of_global(x),
        lambda x: CONFIG(x),
        lambda x: Config.__call__(CONFIG, x),
        lambda x: x + (lambda config: config.own)(CONFIG),
    ],
)
def test_attributes_of_what_is_named_count(f):
    same_as_plain(f, attribute(CONFIG, "own"))


def test_a_method_of_another_object_reads_that():
    box = SimpleNamespace(config=Config(2))
    f = lambda x: box.config.add(x)  # noqa: E731
    same_as_plain(f, lambda: setattr(box, "config", Config(9)))
    same_as_plain(f, attribute(box.config, "own"))


def test_what_functions_of_the_user_read_further_down_counts(monkeypatch):
    for f in (helper, further, twice, Config.of_none, lambda x: map(twice, [x]).__next__()):
        g = f if f is not Config.of_none else lambda x: x + Config.of_none()
        same_as_plain(g, lambda: monkeypatch.setitem(globals(), "FACTOR", FACTOR + 4))
    same_as_plain(further, lambda: monkeypatch.setitem(globals(), "helper", lambda x: x - 5))


def test_functions_that_are_changed_in_place_count():
    scope = {}
    exec("def inner(x, k=2):\n    return x + k\ndef outer(x):\n    return inner(x)", scope)
    inner, outer = scope["inner"], scope["outer"]
    same_as_plain(outer, lambda: setattr(inner, "__defaults__", (9,)))
    same_as_plain(outer, lambda: setattr(inner, "__code__", (lambda x, k=2: x - k).__code__))
    same_as_plain(outer, lambda: setattr(outer, "__code__", (lambda x: x + 1).__code__))


def test_attributes_of_classes_slots_modules_and_functions_count():
    slots, module = Slots(), types.ModuleType("settings_of_a_test")
    module.scale, helper.k = 4, 5
    same_as_plain(lambda x: x + slots.own, attribute(slots, "own"))
    same_as_plain(lambda x: x + module.scale, attribute(module, "scale"))
    same_as_plain(lambda x: x + helper.k, attribute(helper, "k"))
    same_as_plain(lambda x, f: x + f.k, attribute(helper, "k"), helper)
    same_as_plain(lambda x: x + Config.scale, attribute(Config, "scale"))
    same_as_plain(lambda x: x + CONFIG.scale, attribute(Config, "scale"))
    same_as_plain(lambda x, c: x + c.scale, attribute(Config, "scale"), CONFIG)
    same_as_plain(lambda x: x + CONFIG.of_class(), attribute(Config, "scale"))


@pytest.mark.parametrize("way", ["is it", "closed over", "argument"])
def test_of_modules_objects_hooks_classes_and_what_they_read_count(way, monkeypatch):
    net = Net()
    f, args = {
        "is it": (net, ()),
        "closed over": (lambda x: net(x), ()),
        "argument": (lambda x, n: n(x), (net,)),
    }[way]
    same_as_plain(f, attribute(net.config, "scale"), *args)
    same_as_plain(f, lambda: setattr(net, "config", SimpleNamespace(scale=5)), *args)
    same_as_plain(f, lambda: monkeypatch.setattr(Net, "factor", Net.factor + 1), *args)
    same_as_plain(f, lambda: monkeypatch.setitem(globals(), "FACTOR", FACTOR + 1), *args)
    hooks = []
    add = lambda: hooks.append(net.register_forward_hook(lambda m, a, y: y + 100))  # noqa: E731
    same_as_plain(f, add, *args)
    same_as_plain(f, lambda: [hook.remove() for hook in hooks], *args)
    monkeypatch.setattr(Net, "forward", lambda self, x: x + self.config.scale)
    same_as_plain(f, attribute(net.config, "scale"), *args)


def test_a_tensor_that_a_module_holds_is_read_anew():
    net = Net()
    g = spmd(lambda x: x + net.weight)
    for value in (1, 5):
        net.weight = cut(value, value)
        assert value_of(g(X)) == value
    assert len(g.programs) == 1


def test_what_functions_that_are_arguments_read_counts():
    scale, trainer, items = 2, Trainer(), [3]

    def by_cell(x):
        return x + scale

    def more():
        nonlocal scale
        scale += 3

    run = lambda x, f: f(x)  # noqa: E731
    same_as_plain(run, more, by_cell)
    same_as_plain(run, attribute(trainer, "rate"), trainer.step)
    same_as_plain(run, lambda: items.append(1), lambda x: x + len(items))
    same_as_plain(run, lambda: items.append(1), functools.partial(lambda y, x: x + len(y), items))


VALUES = {
    "range": (lambda r: r.stop, lambda: range(0, 3, 2), lambda: range(0, 4, 2)),
    "datetime": (
        lambda d: d.hour,
        lambda: datetime.datetime(2020, 1, 1, 12, tzinfo=datetime.timezone.utc),
        lambda: datetime.datetime(
            2020, 1, 1, 14, tzinfo=datetime.timezone(datetime.timedelta(hours=2))
        ),
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_are_equal_and_not_the_same_differ(name):
    read, one, other = VALUES[name]
    assert one() == other()
    g = spmd(lambda x, v: x + read(v))
    assert [value_of(g(X, v())) for v in (one, other)] == [read(one()), read(other())]


class Whole(int):
    pass


def in_place():
    """Values that change in place, each with what reads it and what changes it."""
    yield collections.deque([1]), lambda v: v[0], lambda v: v.appendleft(5)
    yield array.array("i", [1]), lambda v: v[0], lambda v: v.__setitem__(0, 5)
    yield bytearray([1]), lambda v: v[0], lambda v: v.__setitem__(0, 5)
    yield memoryview(bytearray([1])), lambda v: v[0], lambda v: v.__setitem__(0, 5)
    own = {"a": 1}
    yield types.MappingProxyType(own), lambda v: v["a"], lambda _: own.update(a=5)
    of_view = {"a": 1}
    yield of_view.values(), lambda v: next(iter(v)), lambda _: of_view.update(a=5)
    yield collections.ChainMap({"a": 1}), lambda v: v["a"], lambda v: v.update(a=5)
    yield collections.UserList([1]), lambda v: v[0], lambda v: v.insert(0, 5)
    yield SimpleNamespace(a=1), lambda v: v.a, lambda v: setattr(v, "a", 5)
    whole = Whole(1)
    whole.a = 1
    yield whole, lambda v: v.a, lambda v: setattr(v, "a", 5)


@pytest.mark.parametrize("i", range(10))
def test_values_that_change_in_place_count(i):
    value, read, change = list(in_place())[i]
    same_as_plain(lambda x: x + read(value), lambda: change(value))
    value, read, change = list(in_place())[i]
    same_as_plain(lambda x, v: x + read(v), lambda: change(value), value)


def test_each_call_takes_other_values_of_an_iterator():
    numbers = iter(range(1, 9))
    g = spmd(lambda x: x + next(numbers))
    assert [value_of(g(X)), value_of(g(X))] == [1, 2]


def test_partials_count_by_what_they_hold_now():
    partial = functools.partial(lambda x, k: x + k, k=1)
    same_as_plain(partial, lambda: partial.keywords.update(k=6))
    same_as_plain(lambda x: partial(x), lambda: partial.keywords.update(k=8))


def test_what_a_partial_is_bound_to_counts_with_what_it_reads():
    scale = 2

    def by_cell(x):
        return x + scale

    def more():
        nonlocal scale
        scale += 3

    same_as_plain(functools.partial(lambda f, x: f(x), by_cell), more, times=2)


def test_an_object_that_is_called_counts_by_what_it_reads():
    config = Config()
    same_as_plain(config, attribute(config, "own"), times=2)


def test_what_a_function_of_dtensors_reads_counts_where_it_is_an_argument():
    scale = 2
    inner = spmd(lambda x: x + scale)
    g = spmd(lambda x, f: f(x))
    assert value_of(g(X, inner)) == 2
    scale = 5
    assert value_of(g(X, inner)) == 5


def test_classes_that_share_a_forward_count_each():
    class One(Net):
        factor = 1

    class Two(Net):
        factor = 2

    parts = [One(), Two()]
    net = torch.nn.Sequential(*parts)
    for kind in (One, Two):
        same_as_plain(net, attribute(kind, "factor"))


def test_objects_inside_of_each_other_count_six_deep():
    innermost = outer = SimpleNamespace(own=1)
    for _ in range(5):
        outer = SimpleNamespace(inner=outer)

    def read(value):
        while hasattr(value, "inner"):
            value = value.inner
        return value.own

    same_as_plain(lambda x: x + read(outer), attribute(innermost, "own"))
    same_as_plain(lambda x, v: x + read(v), attribute(innermost, "own"), outer)


def test_equal_arguments_of_other_objects_make_no_other_program():
    g = spmd(lambda x, v: x)
    for _ in range(2):
        for value in ([], (), {}, set(), [1], {"a": [2]}, 2.5, range(3), array.array("i")):
            g(X, [value])
    assert len(g.programs) == 9


def test_an_iterator_that_an_object_holds_makes_no_other_program():
    trainer = Trainer()
    trainer.batches = iter([1, 2])
    g = spmd(trainer.by_name)
    g(X)
    g(X)
    assert len(g.programs) == 1


def test_a_value_that_changes_at_each_call_is_told_by_its_name(monkeypatch):
    monkeypatch.setattr(again, "TIMES", 3)
    trainer = Trainer()
    g = spmd(trainer.counted)
    assert [value_of(g(X)), value_of(g(X))] == [3, 4]
    with pytest.warns(FallbackWarning, match=r"again for each value of self\.rate, so far for 3"):
        g(X)
    assert trainer.rate == 5


def test_objects_that_hold_each_other_and_functions_that_call_each_other_end():
    one, other = Config(), Config()
    one.other, other.other = other, one
    f = lambda x: use(x, one)  # noqa: E731

    def use(x, config, deep=0):
        return x + config.other.own if deep else use(x, config, 1)

    same_as_plain(f, attribute(other, "own"))
    same_as_plain(f, attribute(other, "own"))


def test_what_is_written_alone_is_not_read():
    def f(self, x):
        self.seen = x.shape
        self.count += 1
        return x

    assert not chains_in(f.__code__)


def test_a_function_that_counts_or_notes_its_recordings_is_recorded_once():
    class Runs:
        count = 0

    runs, noted = Runs(), []

    def note(what):
        noted.append(what)

    def f(x):
        runs.count += 1
        note(runs.__class__)
        return x

    g = spmd(f)
    for _ in range(3):
        g(X)
    assert len(g.programs) == runs.count == len(noted) == 1


def test_what_is_written_and_read_counts():
    items = [1]

    def f(x):
        items.append(2)
        return x + len(items)

    g = spmd(f)
    assert [value_of(g(X)), value_of(g(X))] == [2, 3]


def test_names_of_chains():
    def f(self, x):
        a = self.config.inner
        b = (c := self.weight).scale
        for d in self.layers:
            x = d.w + x
        return a.scale + b + c + torch.nn.functional.relu(x) + sum(self.k for _ in x)

    names = {".".join((c.name, *c.attributes)) for c in chains_in(f.__code__)}
    assert names >= {"self.config.inner.scale", "self.layers", "self.k", "self.weight"}
    assert "self" not in names
    assert "torch.nn.functional.relu" in names


def test_a_function_is_not_kept():
    def f(x):
        return helper(x)

    seen = weakref.ref(f)
    call(f, X)
    call(f, X)
    del f
    gc.collect()
    assert seen() is None


def test_a_tensor_that_was_replaced_is_not_kept():
    trainer = Trainer()
    g = spmd(trainer.weighed)
    g(X)
    seen = weakref.ref(trainer.weight.held[0])
    trainer.weight = cut(3, 3)
    g(X)
    gc.collect()
    assert seen() is None


def test_an_object_with_a_method_of_a_package_counts_by_what_it_holds():
    class Named(collections.UserDict):
        pass

    named = Named(a=1)
    same_as_plain(lambda x: x + named.get("a"), lambda: named.update(a=named["a"] + 4), times=3)


def test_functions_of_packages_are_not_looked_into():
    values = Reads(lambda x: dataclasses.astuple(sys.intern)).values()
    assert all(not isinstance(v, types.FunctionType) for v in values)


CHANGES = {
    "rate": lambda t, k: setattr(t, "rate", k),
    "own": lambda t, k: setattr(t.config, "own", k),
    "config": lambda t, k: setattr(t, "config", Config(k)),
    "part": lambda t, k: setattr(t.parts[k % 2], "own", k),
    "parts": lambda t, k: t.parts.append(Config(k)),
    "weight": lambda t, k: setattr(t, "weight", cut(k, k)),
    "other": lambda t, k: setattr(t, "other", k),
    "class": lambda t, k: setattr(Config, "scale", k),
    "global": lambda t, k: globals().__setitem__("FACTOR", k),
}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["step", "by_helper", "inner", "by_local", "weighed", "by_name"]),
            st.sampled_from(sorted(CHANGES)),
            st.integers(1, 3),
        ),
        max_size=8,
    )
)
def test_results_are_those_of_the_function_whatever_has_changed(changes):
    before, trainer = FACTOR, Trainer()
    known = {}
    try:
        for name, what, k in changes:
            CHANGES[what](trainer, k)
            f = getattr(trainer, name)
            g = known.setdefault(name, spmd(f))
            x = torch.zeros(2, dtype=torch.int64)
            wanted = trainer.weight.full() if name == "weighed" else f(x)
            assert g(X).full().tolist() == wanted.tolist()
    finally:
        Config.scale = 1
        globals()["FACTOR"] = before
