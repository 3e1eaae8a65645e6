"""What the options of a graph cost together, said once more and as plainly as can be."""

from collections.abc import Hashable, Mapping
from typing import Any

import attrs

from fdtensor.programs.nodes import Price


@attrs.frozen
class Table(Price):
    """The prices of moves, by the kind of the value and its two placements."""

    prices: Mapping[tuple[Hashable, Any, Any], float]
    kind_of: Mapping[int, Hashable]

    def __call__(self, v, p, q, use=None) -> float:
        return self.prices[self.kind_of[v], p, q]

    def kind(self, v: int) -> Hashable:
        return self.kind_of[v]


def price_of(nodes, picks, price, share) -> float:
    """The seconds of nodes with these options: each move once for all where `share(v)`."""
    held: dict[int, Any] = {}
    moves = set()
    total = 0.0
    for i, (node, k) in enumerate(zip(nodes, picks)):
        option = node.options[k]
        total += option.seconds
        for j, (v, wanted) in enumerate(zip(node.ins, option.ins)):
            move = v, held[v], wanted, node.use(j)
            moves.add(move if share(v) else (*move, i, j))
        held.update((v, p) for v, p in zip(node.outs, option.outs) if v is not None)
    return total + sum(price(*move[:4]) for move in moves)


def always(v: int) -> bool:
    """Every value's moves are shared."""
    return True


def nodes_of(program, axis=None):
    """The nodes of a program on `axis`, how moves are priced, and the options chosen.

    Without an axis, on the one that the mesh has.
    """
    choices = program.origin.choices
    ((axis, choice),) = [item for item in choices.items() if axis in (None, item[0])]
    picks = []
    calls = iter(choice.calls)
    graph = program.origin.graph
    skipped = len(graph.inputs) + len(graph.constants)
    ends = [*choice.ins, *[None] * len(graph.constants)]
    nodes = choice.problem.nodes
    for i, node in enumerate(nodes):
        if i < skipped:
            picks.append(0 if ends[i] is None else [o.outs[0] for o in node.options].index(ends[i]))
        elif i < skipped + len(choice.calls):
            taken = next(calls)
            known = [(o.ins, o.outs) for o in node.options]
            picks.append(known.index((taken.ins, taken.outs)))
        else:
            wanted = choice.outs[i - skipped - len(choice.calls)]
            picks.append([o.ins[0] for o in node.options].index(wanted))
    return nodes, choice.problem.prices, picks
