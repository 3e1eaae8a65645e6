"""`solved_by_flows`: the choice of an option for each node as an integer program.

There is one variable for each option and one for each move; the moves of a value are flows from the
options that make it to those that take it, which makes the relaxation tight. Nodes of one class
share their variables, so that a graph of many layers is no larger than one of a few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

import attrs
import numpy as np

from fdtensor.programs.integer_program import IntegerProgram
from fdtensor.programs.moves import IMPOSSIBLE
from fdtensor.programs.nodes import Node, Price

__all__ = ["Picked", "Values", "solved_by_flows", "values_of"]

P = TypeVar("P")

_Priced = Mapping[tuple[Any, Any], float]
"""The seconds of a move by its two placements."""


FIRST = 1e-12
"""The seconds that an option costs more than the one before it: of equal ones the first is taken,
whatever the solver does."""


@attrs.frozen
class Picked:
    """The number of an option for each node."""

    options: list[int]
    whole: bool
    """Whether they are the best, not what the relaxation takes most of each node."""
    program: IntegerProgram | None = None
    """What was solved for them; None where it took none."""


@attrs.frozen
class Values:
    """Values that are made by one class of nodes and taken by the same classes: they move alike."""

    v: int
    """One of them."""
    count: int
    maker: tuple[int, int]
    """The class that makes them, and the number of the result."""
    takers: Mapping[tuple[int, int], int]
    """The classes that take them, each with the number of its operand, and how many nodes do."""


def values_of(
    nodes: Sequence[Node], first: Sequence[int], as_one: bool = False
) -> Iterator[Values]:
    """The values of a graph whose nodes have these classes.

    With `as_one`, operands and results of a node that all its options place alike count as one.
    """
    numbered = [
        node.equals() if as_one else (range(len(node.ins)), range(len(node.outs))) for node in nodes
    ]
    takers: dict[int, Counter[tuple[int, int]]] = {}
    for n, (node, (ins, _)) in enumerate(zip(nodes, numbered, strict=True)):
        for i, v in zip(ins, node.ins, strict=True):
            takers.setdefault(v, Counter())[first[n], i] += 1
    groups: dict[Hashable, list[int]] = {}
    for n, (node, (_, outs)) in enumerate(zip(nodes, numbered, strict=True)):
        for k, v in zip(outs, node.outs, strict=True):
            if v is not None and v in takers:
                group = (first[n], k), frozenset(takers[v].items())
                groups.setdefault(group, []).append(v)
    for (maker, _), members in groups.items():  # type: ignore[misc]
        yield Values(members[0], len(members), maker, takers[members[0]])  # type: ignore[arg-type]


def solved_by_flows(
    nodes: Sequence[Node],
    first: Sequence[int],
    price: Price,
    share: Callable[[int], bool],
    whole: bool = True,
    before: IntegerProgram | None = None,
) -> Picked:
    """The number of an option for each node; nodes of one class take the same one.

    `first` has the class of each node, as the number of its first one. Not `whole` the relaxation
    alone is solved. Where one with the same constraints was solved `before`, it goes on from there.
    """
    model = IntegerProgram()
    many = Counter(first)
    picks = {n: _pick(model, node, many[n]) for n, node in enumerate(nodes) if n in many}
    known: dict[Hashable, _Priced] = {}
    for values in values_of(nodes, first, as_one=True):
        _add_moves(model, nodes, picks, values, price, known, share(values.v))
    solution = model.solve(whole, before)
    best = {n: int(np.argmax(solution.x[pick])) for n, pick in picks.items()}
    return Picked([best[n] for n in first], solution.whole, model)


def _pick(model: IntegerProgram, node: Node, many: int) -> list[int]:
    """The variables of the options of so many nodes, one of which is taken."""
    several = len(node.options) > 1
    options = enumerate(node.options)
    pick = [model.variable((o.seconds + k * FIRST) * many, whole=several) for k, o in options]
    model.constraint(pick, [], 1, 1)
    return pick


def _add_moves(
    model: IntegerProgram,
    nodes: Sequence[Node],
    picks: Mapping[int, Sequence[int]],
    values: Values,
    price: Price,
    known: dict[Hashable, _Priced],
    shared: bool,
) -> None:
    """Adds the moves of values to their uses; `known` has prices by what they depend on."""
    m, k = values.maker
    makers = _grouped(picks[m], [o.outs[k] for o in nodes[m].options])
    moves: dict[Hashable, int] = {}
    uses = [
        (nodes[n].use(i), _grouped(picks[n], [o.ins[i] for o in nodes[n].options]), readers)
        for (n, i), readers in values.takers.items()
    ]
    wanted = Counter((q, use) for use, takers, _ in uses for q in takers if shared)
    for use, takers, readers in uses:
        look = price.kind(values.v), tuple(makers), tuple(takers), use
        if look not in known:
            seconds = price.between(values.v, [*makers], [*takers], use)
            known[look] = dict(zip(product(makers, takers), seconds, strict=True))
        times = values.count * (1 if shared else readers)
        common = {q for q in takers if wanted[q, use] > 1}
        _flow(model, makers, takers, _Moving(known[look], use, times, common, moves))


def _grouped(pick: Sequence[int], placements: Sequence[P]) -> dict[P, list[int]]:
    groups: dict[P, list[int]] = {}
    for x, placement in zip(pick, placements, strict=True):
        groups.setdefault(placement, []).append(x)
    return groups


@attrs.frozen
class _Moving:
    """A value on its way to a use."""

    prices: _Priced
    use: Any
    """What prices its moves besides."""
    times: int
    """How many values move so."""
    common: Collection[Any]
    """The placements that other uses take too: a move to one is paid once."""
    moves: dict[Hashable, int]
    """The variables of the moves so far that several uses share."""


def _flow(
    model: IntegerProgram,
    makers: dict[Any, list[int]],
    takers: dict[Any, list[int]],
    moving: _Moving,
) -> None:
    """Adds the moves of a value to one use: a flow from its makers' placements to its takers'.

    `makers` and `takers` are the variables of options by placement.
    """
    prices = moving.prices
    if not any(prices.values()):
        return
    if len(makers) == 1 or len(takers) == 1:
        for p, q in prices:
            _pay(model, moving, p, q, takers[q] if len(makers) == 1 else makers[p])
        return
    # of a tie only what stays: large costs would not be exact
    tied = takers.keys() <= makers.keys() and all(s >= IMPOSSIBLE for s in prices.values() if s)
    if tied:
        flow = {p: model.variable(0.0) for p in takers}
        for p, options in makers.items():
            model.constraint([flow[p]] if p in flow else [], options, 0, 0)
        for p, options in takers.items():
            model.constraint([flow[p]], options, 0, 0)
        return
    begin, width = model.variables(len(prices)), len(takers)
    end = begin + len(prices)
    for y, options in zip(range(begin, end, width), makers.values(), strict=True):
        model.constraint(range(y, y + width), options, 0, 0)
    for y, options in zip(range(begin, begin + width), takers.values(), strict=True):
        model.constraint(range(y, end, width), options, 0, 0)
    for y, (p, q) in zip(range(begin, end), prices, strict=True):
        _pay(model, moving, p, q, (y,))


def _pay(model: IntegerProgram, moving: _Moving, p: Any, q: Any, options: Sequence[int]) -> None:
    """Adds that a move is paid where one of the options is taken."""
    seconds = moving.prices[p, q] * moving.times
    if q not in moving.common:
        for x in options:
            model.costs[x] += seconds
    elif seconds or p != q:  # of no cost too: other prices keep the constraints then
        key = (p, q, moving.use)
        if key not in moving.moves:
            moving.moves[key] = model.variable(seconds)
        model.constraint([moving.moves[key]], options, 0, np.inf)
