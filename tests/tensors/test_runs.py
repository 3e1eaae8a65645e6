"""Functions that run out of containers, attributes and objects: what they read counts too."""

import collections
import contextlib
import dataclasses
import functools
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from fdtensor import spmd
from tests.tensors.test_reads import X, attribute, same_as_plain, value_of


class Layer:
    """An object whose methods read what lies around their class."""

    def __init__(self, config):
        self.config = config
        self.all = [self.run]

    def run(self, x):
        return x + self.config.rate

    def __getitem__(self, i):
        return self.config.rate + i

    def __len__(self):
        return self.config.rate

    def __float__(self):
        return float(self.config.rate)

    def __iter__(self):
        yield self.config.rate

    def __enter__(self):
        return self.config.rate

    def __exit__(self, *error):
        pass

    def __radd__(self, x):
        return x + self.config.rate


class Pair(NamedTuple):
    act: object
    other: int


def ways(config):
    """Functions of a tensor that read the rate of `config` by a function they do not name."""

    def act(x):
        return x + config.rate

    @contextlib.contextmanager
    def context():
        yield config.rate

    class Acts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.acts, self.by_name = act, [act], {"act": functools.partial(act)}

        def forward(self, x, way):
            acts = {"attribute": self.act, "list": self.acts[0], "dict": self.by_name["act"]}
            return acts[way](x)

    class Made:
        def __init__(self):
            self.rate = config.rate

        def run(self, x):
            return x + self.rate

    @dataclasses.dataclass
    class Field:
        rate: int = 0

        def __post_init__(self):
            self.rate = config.rate

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return grad + config.rate

    def within(x):
        with context() as rate:
            return x + rate

    layer, acts, by_name = Layer(config), [act], {"act": act, "made": Made}
    pair, ordered = Pair(act, 1), collections.OrderedDict(act=act)
    module, layers = Acts(), (Layer(config),)
    gradient = torch.func.grad(lambda x: Gradient.apply(x).sum())

    def entered(x):
        with layer as rate:
            return x + rate

    return {
        "list": lambda x: acts[0](x),
        "loop": lambda x: next(f(x) for f in acts),
        "dict": lambda x: by_name["act"](x),
        "named tuple": lambda x: pair.act(x),
        "part of a named tuple": lambda x: pair[0](x),
        "ordered": lambda x: ordered["act"](x),
        "deque": lambda x, acts=collections.deque([act]): acts[0](x),
        "nested": lambda x, all=(acts, by_name): all[0][0](x),
        "default": lambda x, f=act: f(x),
        "default by name": lambda x, *, fs=[act]: fs[0](x),
        "getattr": lambda x: getattr(layer, "run")(x),  # noqa: B009
        "of a layer": lambda x: next(one.run(x) for one in layers),
        "list of an object": lambda x: layer.all[0](x),
        "item": lambda x: x + layer[0],
        "len": lambda x: x + len(layer),
        "float": lambda x: x + int(float(layer)),
        "iter": lambda x: x + sum(layer),
        "operator": lambda x: x.sub(0) + layer,
        "entered": entered,
        "context": within,
        "attribute of a module": lambda x: module(x, "attribute"),
        "list of a module": lambda x: module(x, "list"),
        "dict of a module": lambda x: module(x, "dict"),
        "module in a list": lambda x, modules=[module]: modules[0](x, "attribute"),
        "class": lambda x: Made().run(x),
        "class in a dict": lambda x: by_name["made"]().run(x),
        "dataclass": lambda x: x + Field().rate,
        "autograd.Function": lambda x: gradient(x.float()).long(),
    }


@pytest.mark.parametrize("way", ways(SimpleNamespace(rate=1)))
def test_a_function_that_is_not_named_counts_by_what_it_reads(way):
    config = SimpleNamespace(rate=3)
    same_as_plain(ways(config)[way], attribute(config, "rate"))


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_other_functions_in_a_container_count_by_what_they_read(kind):
    config = SimpleNamespace(add=1, subtract=1, acts=None)
    acts = [lambda x: x + config.add, lambda x: x - config.subtract]
    made = {"list": lambda f: [f], "tuple": lambda f: (f,), "dict": lambda f: {0: f}}
    box = SimpleNamespace(acts=made[kind.__name__](acts[0]))
    f = spmd(lambda x: box.acts[0](x))
    for add, subtract, act in ((1, 1, 0), (1, 1, 1), (1, 2, 1), (1, 2, 0), (3, 2, 0), (3, 5, 1)):
        config.add, config.subtract = add, subtract
        if kind is tuple:
            box.acts = (acts[act],)
        else:
            box.acts[0] = acts[act]
        assert value_of(f(X)) == (add if act == 0 else -subtract)


def test_other_functions_in_a_list_of_a_module_count_by_what_they_read():
    config = SimpleNamespace(add=1, subtract=1)
    acts = [lambda x: x + config.add, lambda x: x - config.subtract]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.acts = [acts[0]]

        def forward(self, x):
            return self.acts[0](x)

    model = Model()
    for f in (spmd(model), spmd(lambda x: model(x))):
        for add, subtract, act in (
            (1, 1, 0),
            (1, 1, 1),
            (1, 2, 1),
            (1, 2, 0),
            (3, 2, 0),
            (3, 5, 1),
        ):
            config.add, config.subtract, model.acts[0] = add, subtract, acts[act]
            assert value_of(f(X)) == (add if act == 0 else -subtract)


@dataclasses.dataclass
class Node:
    """An object that has no hash, and may hold itself."""

    rate: int
    next: object = None

    def run(self, x):
        return x + self.rate + RATE


RATE = 1


def test_objects_without_a_hash_that_hold_each_other_end(monkeypatch):
    nodes = [Node(1), Node(2)]
    nodes[0].next, nodes[1].next = nodes[1], nodes
    nodes.append(nodes)
    model = torch.nn.Identity()
    model.nodes, model.run = nodes, nodes[0].run
    f = lambda x: model.run(x) + nodes[1].run(x) + model.nodes[0].next.run(x)  # noqa: E731
    same_as_plain(f, lambda: monkeypatch.setitem(globals(), "RATE", RATE + 3))
    same_as_plain(f, attribute(nodes[1], "rate"))


def test_methods_that_nothing_names_do_not_count():
    class Trainer:
        def __init__(self):
            self.steps = [self.run]

        def run(self, x):
            return x + 1

        def log(self):
            return LOGGED

    trainer = Trainer()
    f = spmd(lambda x: trainer.steps[0](x) + len(trainer.steps))
    for _ in range(3):
        global LOGGED
        LOGGED += 1
        f(X)
    assert len(f.programs) == 1


LOGGED = 0
