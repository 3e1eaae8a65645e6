"""`input_node` and `output_node`: the ends of a graph as nodes, some of which are tied.

An output that is to have the layout of an input which is open is tied to it: the input gives,
beside its own value, a tie in the same placement, the output takes it in its own, and a tie never
moves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, cast

import attrs

from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut, Partial, Placement, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Full, Graph
from fdtensor.ops.lift import layout_of
from fdtensor.ops.notation.core import R
from fdtensor.programs.choices import Choices, Constraints
from fdtensor.programs.nested import Nested, layout_at
from fdtensor.programs.nodes import Node, Option, Place

__all__ = [
    "Tied",
    "Wanted",
    "any_place",
    "block",
    "input_node",
    "numbered",
    "open_input",
    "open_places",
    "output_node",
    "tie",
    "tied_inputs",
    "typed",
    "wanted",
]

DEFERRED = 0.5
"""The part of the seconds of reducing a result that it costs to leave it pending: a reduce_scatter,
which may be all that is needed, takes about half of an all_reduce."""


@attrs.frozen
class Tied:
    """The layout that is chosen for an input, by its number, as the one wanted of an output."""

    input: int


Wanted = Layout | Tied | None
"""What is asked of an output: a layout, that of an input, or the cheapest."""


def numbered(types: Sequence[object]) -> list[int | None]:
    """The number of the input in place of each type, None where there is none."""
    numbers = count()
    return [None if t is None else next(numbers) for t in types]


def tied_inputs(wants: Sequence[Wanted]) -> dict[int, int]:
    """The number of the input to which each output is tied that is."""
    return {k: want.input for k, want in enumerate(wants) if isinstance(want, Tied)}


def tie(graph: Graph, k: int) -> int:
    """The number of the value by which outputs are tied to input `k`; no call has it."""
    return len(graph.types) + k


def input_node(
    graph: Graph, k: int, places: Iterable[Any], sizes: Mapping[Any, int], constraints: Constraints
) -> Node:
    """The node of input `k`, which may have these places; `sizes` has the bytes of open ones."""
    v, times = graph.inputs[k].index, list(constraints.ties.values()).count(k)
    outs = (v, tie(graph, k)) if times else (v,)
    options = [
        Option((), (p,) * len(outs), constraints.holding * (1 + times) * sizes.get(p, 0))
        for p in places
    ]
    return Node((), outs, tuple(options))


def open_input(
    graph: Graph,
    k: int,
    places: Iterable[tuple[Placement, ...]],
    mesh: Mesh,
    constraints: Constraints,
) -> Node:
    """The node of input `k`, which may have these placements on all axes: first those of less."""
    full = graph.types[graph.inputs[k].index]
    sizes = {p: block(full, p, mesh.sizes).nbytes for p in places}
    return input_node(graph, k, sorted(sizes, key=sizes.__getitem__), sizes, constraints)


def output_node(
    graph: Graph,
    k: int,
    places: Iterable[Any],
    constraints: Constraints,
    price: Callable[[int, Any, Any], float],
    uses: tuple[Any, ...] = (),
) -> Node:
    """The node of output `k`, which may have these places; `uses` prices its moves besides.

    What stays pending though nobody asked costs about what reducing it will, by `price`: of several
    terms that are added up before, each its part.
    """
    i = constraints.ties.get(k)
    v = graph.outs[k].index
    ins = (v,) if i is None else (v, tie(graph, i))
    ends = [(p, _whole(p)) if constraints.pending else (p, p) for p in places]
    part = DEFERRED / (constraints.terms or 1)
    owed = [part * price(v, p, q) if p != q else 0.0 for p, q in ends]
    options = [Option((p,) * len(ins), (), s) for (p, _), s in zip(ends, owed, strict=True)]
    return Node(ins, (), tuple(options), uses * len(ins))


def _whole(place: Any) -> Any:
    """A placement, or those of several axes, once what is pending is reduced."""
    if isinstance(place, tuple):
        each = tuple(map(_whole, cast("tuple[Any, ...]", place)))
        return Nested(each, place.order) if isinstance(place, Nested) else each
    return R if isinstance(place, Partial) else place


def open_places(
    graph: Graph, k: int, left: Full, size: int, constraints: Constraints
) -> dict[Placement, int]:
    """The places on one axis of an open input, and the bytes of what they leave of a block.

    Outputs that are tied to it may have them too.
    """
    ends = [graph.inputs[k], *(graph.outs[o] for o, i in constraints.ties.items() if i == k)]
    dims = min(graph.types[v.index].ndim for v in ends)
    uncut = constraints.uncut.get(graph.inputs[k], ())
    places = any_place(graph.types[graph.inputs[k].index], uncut, dims)
    return {p: block(left, (p,), (size,)).nbytes for p in places}


def block(full: Full, placements: Iterable[Place], sizes: Iterable[int]) -> Full:
    """The largest block that these placements, on axes of these sizes, leave."""
    shape = list(full.shape)
    for p, size in zip(placements, sizes, strict=True):
        if isinstance(p, Cut):
            shape[p.dim] = -(-shape[p.dim] // size)
    return Full(tuple(shape), full.dtype)


def any_place(full: Full, uncut: Collection[int] = (), dims: int | None = None) -> list[Placement]:
    """Replicate, and a cut of each of the first `dims` dims that have two indices or more."""
    sizes = enumerate(full.shape[:dims])
    return [R, *(Shard(d) for d, n in sizes if n > 1 and d not in uncut)]


def typed(
    types: Sequence[TensorType | FreeType],
    mesh: Mesh,
    choices: Choices,
    nesting: tuple[str, ...],
) -> tuple[TensorType, ...]:
    """The types of inputs, free ones in the layouts that were chosen.

    Where several axes cut one dim of these, they do so in the order that was chosen, or `nesting`.
    """
    whole: list[TensorType] = []
    for k, t in enumerate(types):
        if isinstance(t, FreeType):
            placements = tuple([choices[axis].ins[k] for axis in mesh.axes])
            laid = layout_of(mesh, placements, nesting)
            if choices.nested is not None:
                laid = layout_at(mesh, choices.nested.ins[k])
            t = TensorType(t.shape, t.dtype, laid)
        whole.append(t)
    return tuple(whole)


def wanted(wants: Sequence[Wanted], in_types: Sequence[TensorType]) -> tuple[Layout | None, ...]:
    """The layouts of outputs, those of inputs where they are tied."""
    return tuple([in_types[w.input].layout if isinstance(w, Tied) else w for w in wants])
