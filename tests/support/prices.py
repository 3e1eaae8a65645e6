"""What the options of a graph cost together, said once more and as plainly as can be."""

from typing import Any


def price_of(nodes, picks, price, share) -> float:
    """The seconds of nodes with these options: each move once for all where `share(v)`."""
    held: dict[int, Any] = {}
    moves = set()
    total = 0.0
    for i, (node, k) in enumerate(zip(nodes, picks)):
        option = node.options[k]
        total += option.seconds
        for j, (v, wanted) in enumerate(zip(node.ins, option.ins)):
            if wanted != held[v]:
                moves.add((v, held[v], wanted) if share(v) else (v, held[v], wanted, i, j))
        held.update((v, p) for v, p in zip(node.outs, option.outs) if v is not None)
    return total + sum(price(*move[:3]) for move in moves)


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
    for i, node in enumerate(choice.nodes):
        if i < skipped:
            picks.append(0 if ends[i] is None else [o.outs[0] for o in node.options].index(ends[i]))
        elif i < skipped + len(choice.calls):
            picks.append(node.options.index(next(calls)))
        else:
            wanted = choice.outs[i - skipped - len(choice.calls)]
            picks.append([o.ins[0] for o in node.options].index(wanted))
    return choice.nodes, choice.prices, picks
