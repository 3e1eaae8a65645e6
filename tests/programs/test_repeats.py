"""Nodes in the same place of repeated layers choose alike, at the price of all of them."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdtensor import Mesh, TensorType
from fdtensor.programs import solver
from fdtensor.programs.flows import solved_by_flows, values_of
from fdtensor.programs.nodes import Node, Option
from fdtensor.programs.repeats import classes
from fdtensor.programs.tracer import trace
from tests.support.prices import Table, price_of

seconds = st.integers(0, 9).map(lambda n: n * 1e-6)
places = st.sampled_from("RSP")


def one_kind(v):
    return 0


@st.composite
def layered(draw):
    """Equal layers one after the other, each of a few nodes that read values of the last two."""
    width = draw(st.integers(1, 2))
    reads = [draw(st.lists(st.integers(1, 2 * width), max_size=2)) for _ in range(width)]
    options = [
        [
            Option(tuple(draw(places) for _ in ins), (draw(places),), draw(seconds))
            for _ in range(draw(st.integers(1, 3)))
        ]
        for ins in reads
    ]
    nodes: list[Node] = []
    for n in range(width * draw(st.integers(4, 8))):
        ins = tuple(n - back for back in reads[n % width] if n >= back)
        taken = [Option(o.ins[: len(ins)], o.outs, o.seconds) for o in options[n % width]]
        nodes.append(Node(ins, (n,), tuple(taken)))
    prices = {(0, p, q): 0.0 if p == q else draw(seconds) for p in "RSP" for q in "RSP"}
    return nodes, Table(prices, dict.fromkeys(range(len(nodes)), 0)), draw(st.booleans())


@given(layered())
def test_no_choice_alike_is_cheaper(graph):
    nodes, price, shared = graph
    first = classes(nodes, one_kind)
    picks = solved_by_flows(nodes, first, price, lambda v: shared).options
    assert picks == [picks[n] for n in first]
    apart = sorted(set(first))
    if len(apart) <= 8:
        every = product(*(range(len(nodes[n].options)) for n in apart))
        spread = ([dict(zip(apart, taken))[n] for n in first] for taken in every)
        least = min(price_of(nodes, each, price, lambda v: shared) for each in spread)
        assert price_of(nodes, picks, price, lambda v: shared) == pytest.approx(least, abs=1e-9)


@given(layered())
def test_those_of_a_class_have_the_same_options(graph):
    nodes, _, _ = graph
    for n, m in enumerate(classes(nodes, one_kind)):
        sides = [
            [(o.ins, o.outs, o.seconds) for o in node.options] for node in (nodes[n], nodes[m])
        ]
        assert sides[0] == sides[1]


def chain(length):
    """A node after the other."""
    options = (Option(("R",), ("R",), 0.0), Option(("S",), ("S",), 0.0))
    start = Node((), (0,), (Option((), ("R",), 0.0),))
    return [start, *(Node((n,), (n + 1,), options) for n in range(length))]


def test_more_layers_are_no_more_classes():
    assert len(set(classes(chain(20), one_kind))) == len(set(classes(chain(200), one_kind)))


def test_values_of_other_kinds_are_not_alike():
    nodes = chain(20)
    assert len(set(classes(nodes, lambda v: v))) == len(nodes)


def decode(x, *weights):
    """One token through many layers: a weight is cut in columns, the next one in rows."""
    for w in weights:
        x = torch.relu(x @ w)
    return x


@pytest.mark.parametrize("mesh", [Mesh(tp=8), Mesh(dp=2, tp=4)], ids=str)
def test_layers_may_take_turns(mesh, monkeypatch):
    types = [
        TensorType(shape, torch.bfloat16, mesh.layout())
        for shape in [(1, 8192), *[(8192, 8192)] * 40]
    ]
    monkeypatch.setattr(solver, "MANY", 0)
    alike = trace(decode, *types)
    monkeypatch.setattr(solver, "MANY", 10**9)
    assert alike.received_bytes == trace(decode, *types).received_bytes


def test_steps_that_read_one_value_each_are_no_more_classes():
    """What `unbind` gives to each step, and `stack` takes of it, differs in its number alone."""

    def steps(count):
        first = Node(
            (),
            tuple(range(count)),
            (Option((), ("R",) * count, 0.0), Option((), ("S",) * count, 1.0)),
        )
        options = Option(("R", "R"), ("R",), 0.0), Option(("S", "S"), ("S",), 1.0)
        chain = [Node((n, count + n - 1 if n else 0), (count + n,), options) for n in range(count)]
        last = tuple(range(count, 2 * count))
        ends = Option(("R",) * count, ("R",), 0.0), Option(("S",) * count, ("S",), 1.0)
        return [first, *chain, Node(last, (2 * count,), ends)]

    assert len(set(classes(steps(40), one_kind))) == len(set(classes(steps(80), one_kind)))
    values = {n: len([*values_of(steps(n), classes(steps(n), one_kind), True)]) for n in (40, 80)}
    assert values[40] == values[80]
