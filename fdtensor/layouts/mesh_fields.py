"""What a mesh is made of, checked: names, sizes, ranks in nested lists, and links.

A link says by its name what connects the ranks along an axis. The figures of each are in
`fdtensor.plans.cost`.
"""

from __future__ import annotations

import keyword
import sys
from collections.abc import Sequence
from math import prod
from typing import Any

from fdtensor.layouts.errors import MeshError
from fdtensor.layouts.kinds import is_list, is_mapping, is_tuple
from fdtensor.layouts.record import integer
from fdtensor.layouts.words import shown

__all__ = [
    "LINKS",
    "Coord",
    "Links",
    "check_names",
    "check_size",
    "flattened",
    "is_keyword",
    "links_of",
    "listed",
    "nested",
    "no_axis_names",
    "no_coord",
    "size_of",
]

MOST_AXES = 32
"""An array has at most so many dims, with numpy 1."""

Coord = tuple[int, ...]
"""The place of a rank in a mesh: its index along every axis."""

LINKS = ("nvlink", "infiniband", "ethernet")
"""The links that have a name."""

Links = tuple[tuple[str, str], ...]
"""Axes with the names of their links, in the order of the mesh."""


def links_of(axes: Sequence[str], given: object) -> Links:
    """The links that a mapping gives some of these axes; none for None."""
    if given is None:
        return ()
    if not is_mapping(given):
        raise MeshError(
            f"links={given!r} is no mapping.",
            hint="Write links={'dp': 'infiniband', 'tp': 'nvlink'}.",
        )
    for axis, link in given.items():
        if axis not in axes:
            raise MeshError(
                f"links names {axis!r}, which is no axis of the mesh.",
                links=dict(given),
                hint=f"Its axes are {listed(axes)}.",
            )
        if link not in LINKS:
            raise MeshError(
                f"mesh axis {axis!r} has link {link!r}, which is none that has a name.",
                hint=f"Links are {listed(LINKS)}; CostModel.with_links takes others.",
            )
    return tuple([(axis, str(given[axis])) for axis in axes if axis in given])


def no_axis_names(axes: object) -> MeshError:
    """The error for what is no list of names of axes."""
    return MeshError(
        f"axes={shown(axes)} names no mesh axes.", hint="Write a tuple of names: ('dp', 'tp')."
    )


def no_coord(coord: object, axes: Sequence[str], sizes: Coord) -> MeshError:
    """The error for what is no place of a rank."""
    given = tuple(coord) if is_list(coord) else coord
    ends = [f"{axis}: 0 to {size - 1}" for axis, size in zip(axes, sizes, strict=True)]
    return MeshError(
        f"coord={shown(given)} is no place in the mesh.",
        axes=", ".join(ends) or "none",
        hint="Give an index for each axis: mesh.coord(rank) is the place of a rank.",
    )


def check_names(axes: Sequence[object]) -> None:
    for name in axes:
        if not isinstance(name, str) or not name or not name.isprintable():
            raise MeshError(f"{name!r} is no name for a mesh axis.", hint="Use a short string.")


def check_size(axes: Sequence[str], sizes: Coord) -> None:
    if len(axes) > MOST_AXES:
        raise MeshError(
            f"a mesh has at most {MOST_AXES} axes, not {len(axes)}.",
            hint="Name only the axes along which ranks differ in what they do.",
        )
    if prod(sizes) > sys.maxsize:
        raise MeshError(
            f"a mesh of {prod(sizes)} ranks is too large to count its ranks.",
            sizes=dict(zip(axes, sizes, strict=True)),
            hint=f"Keep the product of the sizes below {sys.maxsize}.",
        )


def is_keyword(axis: str) -> bool:
    """Whether the name can be written as that of a keyword argument."""
    return axis.isascii() and axis.isidentifier() and not keyword.iskeyword(axis)


def size_of(axis: str, size: object) -> int:
    try:
        count = integer(size)
    except (TypeError, AttributeError):
        count = 0
    if count < 1:
        more = "; links are a mapping: links={'dp': 'infiniband'}" if axis == "links" else ""
        raise MeshError(
            f"mesh axis {axis!r} has size {size!r}.", hint=f"A size is an int, 1 or more{more}."
        )
    return count


def flattened(level: object, whole: object) -> tuple[Coord, list[int]]:
    """The sizes and the ranks of nested lists that must be regular."""
    if not (is_list(level) or is_tuple(level) or isinstance(level, range)):
        try:
            return (), [integer(level)]
        except (TypeError, AttributeError):
            raise MeshError(
                f"{level!r} is not a rank.", ranks=whole, hint="Ranks are ints."
            ) from None
    parts = [flattened(entry, whole) for entry in level]
    shapes = {sizes for sizes, _ in parts}
    if len(shapes) != 1:
        raise MeshError(
            "the ranks do not form a regular array." if parts else "a mesh axis has no ranks.",
            ranks=whole,
            hint="Every row must have the same length, 1 or more.",
        )
    return (len(parts), *shapes.pop()), [rank for _, flat in parts for rank in flat]


def nested(flat: list[int], sizes: Sequence[int]) -> Any:
    if not sizes:
        return flat[0]
    step = len(flat) // sizes[0]
    return [nested(flat[i * step : (i + 1) * step], sizes[1:]) for i in range(sizes[0])]


def listed(names: Sequence[str], none: str = "none") -> str:
    return ", ".join(map(repr, names)) if names else none
