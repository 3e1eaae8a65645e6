"""`preferred_order`: in which order of axes the values of a graph are read, where it matters.

Several axes that cut one dim do so in an order, by default that of the mesh. What is chosen on all
axes together has its orders (`nested`); these are for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Call, Graph, Var
from fdtensor.ops.lift import kept_cuts, strided_first
from fdtensor.ops.loop_ops import LOOP_NEXT, TIE
from fdtensor.ops.notation.core import Row

__all__ = ["kept_order", "preferred_order"]


def preferred_order(
    graph: Graph, layouts: Sequence[Layout], wants: Sequence[Layout | None], near: bool = False
) -> dict[Var, tuple[str, ...]]:
    """The order of axes in which each value is read or wanted, where one is not that of the mesh.

    A value that is made of none, or of replicas, is cut in that order at once. Where it is `near`,
    an order goes from results to operands of their shape alone.
    """
    known = dict(zip(graph.inputs, map(_order_of, layouts), strict=True))
    wanted = [() if w is None else _order_of(w) for w in wants]
    if not any(known.values()) and not any(wanted):
        return {}
    for call in graph.calls:
        order = next((known[v] for v in call.ins if known.get(v)), ())
        known.update((v, order) for v in call.outs if v is not None)
    preferred: dict[Var, tuple[str, ...]] = {
        v: order for v, order in zip(graph.outs, wanted, strict=True) if order
    }
    for call in reversed(graph.calls):
        order = next((preferred[v] for v in call.outs if v in preferred), ())  # type: ignore[index]
        order = order or next((known[v] for v in call.ins if known.get(v)), ())
        shapes = {graph.types[v.index].shape for v in call.outs if v is not None}
        for v in call.ins if order else ():
            if not near or graph.types[v.index].shape in shapes:
                preferred.setdefault(v, order)
    return preferred


def kept_order(
    call: Call, sides: Sequence[tuple[TensorType, float]], rows: Mapping[str, Row]
) -> tuple[str, ...]:
    """The order of axes that lets the largest operand stay, or be cut further where it is.

    `sides` has the type and the bytes of each operand. No axes where none has such a cut.
    """
    best: tuple[float, tuple[str, ...]] = (0, ())
    cuts = {a: (*row.ins, *row.outs) for a, row in rows.items()}
    for i, (type, nbytes) in enumerate(sides):
        if call.op is LOOP_NEXT and i != TIE:  # a tie says how it goes round
            continue
        kept = kept_cuts(type.layout, {a: row.ins[i] for a, row in rows.items()})
        if kept and nbytes > best[0]:
            others = strided_first([a for a in rows if a not in kept], cuts)
            best = (nbytes, (*kept, *others))
    return best[1]


def _order_of(layout: Layout) -> tuple[str, ...]:
    """The axes in the order of the cuts that are not in that of the mesh, then the others."""
    special = tuple(axis for _, axes in layout.order for axis in axes)
    return (*special, *(a for a in layout.mesh.axes if a not in special)) if special else ()
