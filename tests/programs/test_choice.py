"""The choice of rows over a whole program: never dearer than any other, and than op by op."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdtensor import H100, Mesh, Program, TensorType
from fdtensor.plans.cost import NAMED_LINKS
from fdtensor.programs.flows import solved_by_flows
from fdtensor.programs.nodes import Node, Option
from fdtensor.programs.solver import cheapest
from fdtensor.programs.tracer import trace
from tests.support.prices import Table, always, nodes_of, price_of


def greedy(nodes, price) -> list[int]:
    """Each node in its turn takes the option that is the cheapest for what it is given."""
    held: dict[int, Any] = {}
    paid = set()
    picks = []
    for node in nodes:
        costs = []
        for option in node.options:
            moves = {(v, q) for v, q in zip(node.ins, option.ins) if q != held[v]} - paid
            costs.append(option.seconds + sum(price(v, held[v], q) for v, q in moves))
        k = costs.index(min(costs))
        paid |= set(zip(node.ins, node.options[k].ins))
        held.update((v, p) for v, p in zip(node.outs, node.options[k].outs) if v is not None)
        picks.append(k)
    return picks


def brute(nodes, price, share) -> float:
    """The least price of all combinations of options."""
    every = product(*(range(len(node.options)) for node in nodes))
    return min(price_of(nodes, picks, price, share) for picks in every)


@st.composite
def graphs(draw):
    """Nodes in the order of the data, a price for each move, and whether a value's are shared."""
    placements = st.sampled_from("RSP")
    seconds = st.integers(0, 9).map(lambda n: n * 1e-6)
    nodes: list[Node] = []
    values = 0
    combinations = 1
    for _ in range(draw(st.integers(2, 6))):
        ins = draw(st.lists(st.integers(0, values - 1), max_size=2)) if values else []
        outs = [values + i for i in range(draw(st.integers(0 if ins else 1, 2)))]
        values += len(outs)
        most = min(4, 1024 // combinations)
        options = []
        for _ in range(draw(st.integers(1, max(1, most)))):
            taken = tuple(draw(placements) for _ in ins)
            given = tuple(draw(placements) for _ in outs)
            options.append(Option(taken, given, draw(seconds)))
        combinations *= len(options)
        nodes.append(Node(tuple(ins), tuple(outs), tuple(options)))
    kinds = {v: draw(st.integers(0, v)) for v in range(values)}
    moves = [(kind, p, q) for kind in set(kinds.values()) for p in "RSP" for q in "RSP"]
    others_move = draw(st.booleans())  # other axes, where this one does not
    prices = {m: draw(seconds) if m[1] != m[2] or others_move else 0.0 for m in moves}
    shared = draw(st.sets(st.integers(0, values - 1)))
    return nodes, Table(prices, kinds), lambda v: v in shared


def apart(nodes, price, share):
    """An integer program in which no nodes choose alike."""
    return solved_by_flows(nodes, range(len(nodes)), price, share)


@pytest.mark.parametrize("solve", [cheapest, apart])
@given(graph=graphs())
def test_no_combination_of_options_is_cheaper(solve, graph):
    nodes, price, share = graph
    found = price_of(nodes, solve(nodes, price, share).options, price, share)
    assert found == pytest.approx(brute(nodes, price, share), abs=1e-9)


@pytest.mark.parametrize("solve", [cheapest, apart])
def test_a_move_that_two_need_is_paid_once(solve):
    """Both readers want the value in R: worth a move of 3 seconds once, but not twice."""
    reader = Node((0,), (), (Option(("R",), (), 0.0), Option(("S",), (), 2.0)))
    nodes = [Node((), (0,), (Option((), ("S",), 0.0),)), reader, reader]

    price = Table({(0, p, q): 3.0 * (p != q) for p in "RS" for q in "RS"}, {0: 0})
    assert solve(nodes, price, always).options == [0, 0, 0]
    assert solve(nodes, price, lambda v: False).options == [0, 1, 1]


@pytest.mark.parametrize("solve", [cheapest, apart])
def test_what_stays_along_an_axis_is_paid_where_other_axes_move_it(solve):
    maker = Node((), (0,), (Option((), ("R",), 0.0), Option((), ("S",), 0.0)))
    reader = Node((0,), (), (Option(("R",), (), 0.0), Option(("S",), (), 0.0)))
    costs = {("R", "R"): 3.0, ("S", "S"): 1.0}
    price = Table({(0, p, q): costs.get((p, q), 9.0) for p in "RS" for q in "RS"}, {0: 0})
    assert solve([maker, reader, reader], price, always).options == [1, 1, 1]


TP = Mesh(tp=4)


def split(shape, *dims):
    """A type on `TP`."""
    return TensorType(shape, torch.float32, TP.layout(*dims))


def kept(x):
    """Each step alone is faster when it is cut, but the result is wanted whole."""
    return x.exp().sin()


def three(x, q, k, v):
    """To gather a weight is cheaper than to gather `x`; but once gathered, `x` serves all three."""
    return x @ q, x @ k, x @ v


CHAINS = {
    kept: ([split((2048, 2048))], TP.layout(), []),
    three: (
        [split((1024, 512), "tp"), *[split((512, 768), None, "tp")] * 3],
        None,
        ["all_gather[axis=tp dim=0]"],
    ),
}
"""For each chain the types it takes, the layout it gives, and the collectives that are best."""


@pytest.mark.parametrize("f", CHAINS)
def test_a_chain_where_greedy_loses(f):
    types, wanted, best = CHAINS[f]
    program = trace(f, *types, out_layouts=wanted)
    nodes, price, picks = nodes_of(program)
    chosen = price_of(nodes, picks, price, always)
    one_by_one = price_of(nodes, greedy(nodes, price), price, always)
    assert [str(step.collective) for step in program.collectives] == best
    assert chosen < 0.8 * one_by_one
    (choice,) = program.origin.choices.values()
    assert chosen == pytest.approx(choice.seconds, rel=1e-3)


def test_the_chosen_rows_are_the_cheapest_of_all():
    """All combinations of options of a small program, priced one after the other."""

    def mlp(x, w1, w2):
        return torch.relu(x @ w1) @ w2

    x, w1, w2 = split((64, 32)), split((32, 128), None, "tp"), split((128, 32), "tp")
    program = trace(mlp, x, w1, w2)
    nodes, price, picks = nodes_of(program)
    assert price_of(nodes, picks, price, always) == pytest.approx(brute(nodes, price, always))


def test_a_choice_follows_the_links_that_a_mesh_names():
    """As it follows those of the cost model, on a mesh that names none."""

    def loss(up, down, x):
        return (torch.relu(x @ up) @ down).square().mean()

    def traced(mesh, cost):
        shapes = ((512, 1024), (1024, 512), (256, 512))
        layouts = (mesh.layout(None, "tp"), mesh.layout("tp"), mesh.layout("dp"))
        args = [TensorType(s, torch.float32, layout) for s, layout in zip(shapes, layouts)]
        return trace(torch.func.grad(loss, argnums=(0, 1)), *args, cost=cost)

    def lines(program):
        return str(program).splitlines()[1:]

    for links in ({"dp": "ethernet", "tp": "nvlink"}, {"dp": "nvlink", "tp": "ethernet"}):
        rows = {axis: NAMED_LINKS[link] for axis, link in links.items()}
        named = traced(Mesh(dp=4, tp=4, links=links), H100)
        plain = traced(Mesh(dp=4, tp=4), H100.with_links(**rows))
        assert lines(named) == lines(plain)
        assert named.seconds == plain.seconds
        assert Program.from_json(named.to_json()).seconds == named.seconds
    assert traced(Mesh(dp=4, tp=4), H100).seconds < named.seconds
