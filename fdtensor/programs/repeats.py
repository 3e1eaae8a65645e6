"""`classes`: the nodes that choose alike, since they stand in the same place of repeated layers.

Two nodes look alike where their options do, and the nodes around them look alike, up to some
distance: colors are refined by those of the neighbors, as in the test of isomorphism of Weisfeiler
and Leman (1968). Of the nodes that look alike every other one is of one class, so that layers may
take turns. The layers at the ends of a graph look different, and stay free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from fdtensor.programs.nodes import Node

__all__ = ["classes"]

DISTANCE = 3
"""How far around a node others must look alike."""

TURNS = 2
"""How many layers take turns at most."""


def classes(nodes: Sequence[Node], kind: Callable[[int], Hashable]) -> list[int]:
    """The class of each node: the number of the first one in it.

    `kind` says of a value what the prices of its moves depend on.
    """
    readers: dict[int, list[tuple[int, int]]] = {}
    maker: dict[int, tuple[int, int]] = {}
    for n, node in enumerate(nodes):
        ins, outs = node.equals()
        for i, v in zip(ins, node.ins, strict=True):
            readers.setdefault(v, []).append((n, i))
        pairs = zip(outs, node.outs, strict=True)
        maker.update((v, (n, k)) for k, v in pairs if v is not None)
    colors = _numbered([_look(node, kind) for node in nodes])
    for _ in range(DISTANCE):
        colors = _numbered(
            [
                (
                    colors[n],
                    tuple([(colors[maker[v][0]], maker[v][1]) for v in node.ins]),
                    tuple(
                        [
                            tuple(sorted([(colors[m], i) for m, i in readers.get(v, ())]))
                            for v in node.outs
                            if v is not None
                        ]
                    ),
                )
                for n, node in enumerate(nodes)
            ]
        )
    members: dict[int, list[int]] = {}
    for n, color in enumerate(colors):
        members.setdefault(color, []).append(n)
    first = list(range(len(nodes)))
    for alike in members.values():
        for k, n in enumerate(alike):
            first[n] = alike[k % TURNS]
    return first


def _look(node: Node, kind: Callable[[int], Hashable]) -> Hashable:
    """What is to be seen of a node alone."""
    options = tuple([(option.ins, option.outs, option.seconds) for option in node.options])
    read = tuple([kind(v) for v in node.ins])
    return options, read, tuple([None if v is None else kind(v) for v in node.outs]), node.uses


def _numbered(looks: Sequence[Hashable]) -> list[int]:
    """Numbers for what may be compared, the same where it is equal."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(look, len(numbers)) for look in looks]
