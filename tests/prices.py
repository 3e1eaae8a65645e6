"""What the options of a graph cost together, said once more and as plainly as can be."""

from typing import Any

from fdtensor.choice import Ends, Nodes


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
    before = dict(list(choices.items())[: list(choices).index(axis)])
    ends = Ends(choice.ins, choice.outs)
    made = Nodes(program.origin.graph, program.mesh, axis, ends, before, program.cost, 0)
    nodes = made.nodes()
    skipped = len(nodes) - len(choice.calls) - len(choice.outs)
    picks = [0] * len(nodes)
    for i, taken in enumerate(choice.calls, start=skipped):
        options = [(option.ins, option.outs) for option in nodes[i].options]
        picks[i] = options.index((taken.ins, taken.outs))
    return nodes, made.price, picks
