"""`Nested`: placements on all axes, some of which cut a dim in another order than by default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

import attrs

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut
from fdtensor.layouts.remembered import remembered
from fdtensor.ops.graph import Call, Full
from fdtensor.ops.lift import layout_of, lifted
from fdtensor.ops.notation.core import Row
from fdtensor.ops.pins import pinned
from fdtensor.programs.nodes import Option, Place

__all__ = ["Nested", "Way", "layout_at", "place_of", "shares_dim", "ways_of", "ways_of_end"]

MOST_NESTED = 3
"""The most axes of which every order is tried."""

Order = tuple[tuple[int, tuple[str, ...]], ...]


class Nested(tuple[Any, ...]):
    """A place on each axis, and the order of the axes that cut one dim, as a layout has it.

    In the order of `layout_of` they are a plain tuple, which equals none of these.
    """

    order: Order

    def __new__(cls, places: Sequence[Any], order: Order) -> Nested:
        self = super().__new__(cls, places)
        self.order = order
        return self

    def __getnewargs__(self) -> tuple[tuple[Any, ...], Order]:
        return tuple(self), self.order

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Nested) and self.order == other.order
        return same and super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.order))


def place_of(layout: Layout) -> tuple[Any, ...]:
    """The place on each axis of a layout, with its order where that is another than by default."""
    if layout.order == layout_of(layout.mesh, layout.placements).order:
        return layout.placements
    return Nested(layout.placements, layout.order)


@remembered(16384)
def layout_at(mesh: Mesh, places: tuple[Any, ...]) -> Layout:
    """The layout of these places, none of which is "free"."""
    if isinstance(places, Nested):
        return Layout(mesh, tuple(places), places.order)  # type: ignore[arg-type]
    return layout_of(mesh, places)


def shares_dim(places: Sequence[Place]) -> bool:
    """Whether two axes cut one dim."""
    dims = [p.dim for p in places if isinstance(p, Cut)]
    return len(dims) > len(set(dims))


@attrs.frozen
class Way:
    """An order of axes, and the places of the operands and results of a call in it."""

    order: tuple[str, ...]
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]


def ways_of(
    call: Call, types: Sequence[Full], mesh: Mesh, along: Mapping[str, Option], nested: bool
) -> list[Way]:
    """The ways in which a call may take an option on each axis, that of the mesh first.

    There are several where several axes cut one dim, and the choice is `nested`.
    """
    ins, outs = (
        tuple(zip(*side, strict=True))
        for side in ([o.ins for o in along.values()], [o.outs for o in along.values()])
    )
    plain = Way(mesh.axes, ins, outs)
    if not nested:
        return [plain]
    pin = pinned(call)
    if pin is not None:
        return [Way(mesh.axes, (place_of(pin),), (place_of(pin),))]
    rows = {axis: option.note for axis, option in along.items()}
    is_row = all(isinstance(row, Row) for row in rows.values())
    ways: dict[tuple[Any, ...], Way] = {}
    orders = list(_orders(mesh, (*ins, *outs)))
    for order in orders if len(orders) > 1 else ():
        before, after = ins, outs
        if is_row:
            held = lifted(call, mesh, rows, types, order)
            if held is None:
                continue
            before, after = (
                tuple([plain if t is None else place_of(t.layout) for plain, t in side])
                for side in (zip(ins, held[0], strict=True), zip(outs, held[1], strict=True))
            )
        else:
            before, after = (tuple([_in(mesh, x, order) for x in side]) for side in (ins, outs))
        ways.setdefault((before, after), Way(order, before, after))
    return list(ways.values()) or [plain]


def ways_of_end(mesh: Mesh, places: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The places of an open input or output, in each order of the axes that cut one dim."""
    return list(dict.fromkeys(_in(mesh, places, order) for order in _orders(mesh, (places,))))


def _in(mesh: Mesh, places: tuple[Any, ...], order: tuple[str, ...]) -> tuple[Any, ...]:
    """These places in an order of axes."""
    if "free" in places or not shares_dim(places):
        return places
    try:
        return place_of(layout_of(mesh, tuple(places), order))
    except LayoutError:  # two axes that cannot cut one dim
        return places


def _orders(mesh: Mesh, sides: Sequence[Sequence[Place]]) -> Iterator[tuple[str, ...]]:
    """The orders of axes that differ for these places, some of which cut one dim.

    That of the mesh is the first, and the only one where no dim is shared, or by very many axes.
    """
    axes: set[str] = set()
    for places in sides:
        cuts = [
            (a, p.dim)
            for a, n, p in zip(mesh.axes, mesh.sizes, places, strict=True)
            if isinstance(p, Cut) and n > 1
        ]
        axes |= {a for a, dim in cuts if sum(d == dim for _, d in cuts) > 1}
    within = [a for a in mesh.axes if a in axes]
    if len(within) > MOST_NESTED:
        within = []
    others = [a for a in mesh.axes if a not in within]
    for order in permutations(within):
        yield (*order, *others)
