"""`Mesh`: named axes over ranks. A value: no process group, no device."""

from __future__ import annotations

import functools
import keyword
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any

import attrs

from fdtensor.layouts.errors import MeshError
from fdtensor.layouts.kinds import is_list, is_tuple
from fdtensor.layouts.record import Record, integer, intern

if TYPE_CHECKING:
    from fdtensor.layouts.layout import Layout

__all__ = ["Coord", "Mesh", "mesh_of"]

MOST_AXES = 32
"""An array has at most so many dims, with numpy 1."""

Coord = tuple[int, ...]
"""The place of a rank in a mesh: its index along every axis."""


@attrs.frozen(eq=False, repr=False, init=False)
class Mesh(Record):
    """Ranks arranged along named axes: `Mesh(dp=2, tp=4)` holds ranks 0 to 7, row-major.

    `Mesh.from_ranks` takes ranks in any arrangement, `Mesh.from_device_mesh` a torch DeviceMesh.
    Raises `MeshError` for a size under 1, a name twice, a rank twice, a negative rank, more than
    32 axes or 2**63 ranks.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> mesh.size, mesh.axis_size("tp"), mesh.coord(6)
    (8, 4, (1, 2))
    >>> print(mesh.layout("dp", ("tp",)))
    (dp=S(0), tp=S(1))
    """

    axes: tuple[str, ...]
    """The names of the axes, outermost first."""
    sizes: tuple[int, ...]
    """How many ranks each axis has."""
    order: range | tuple[int, ...]
    """The ranks, row-major; a range where they count up from 0, so millions take no room."""

    if TYPE_CHECKING:

        def __init__(self, **sizes: int) -> None: ...

    else:

        def __init__(self, /, *args: object, **sizes: int) -> None:
            if args:
                raise MeshError(
                    "a mesh takes its axes by name.",
                    got=f"Mesh({', '.join(map(repr, args))})",
                    hint="Write Mesh(dp=2, tp=4), or Mesh.from_ranks([[0, 1]], ('dp', 'tp')).",
                )
            _check_names(tuple(sizes))
            axes, counts = tuple(sizes), tuple(_size(a, n) for a, n in sizes.items())
            _check_size(axes, counts)
            self.__attrs_init__(axes, counts, range(prod(counts)))

        __init__.__signature__ = signature(lambda self, **sizes: None)  # what is not refused

    @classmethod
    def _make(cls, axes: Sequence[str], sizes: Coord, order: Sequence[int]) -> Mesh:
        """The mesh with these fields, as a pickle has them."""
        return mesh_of(axes, sizes, order)

    @classmethod
    def from_ranks(cls, ranks: Any, axes: Sequence[str] | str) -> Mesh:
        """The mesh of `ranks`: a nested list or integer tensor with one level for each axis."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        nested = ranks.tolist() if hasattr(ranks, "tolist") else ranks
        sizes, flat = _flatten(nested, nested)
        if len(names) != len(sizes):
            raise MeshError(
                f"{len(names)} axis names for ranks with {len(sizes)} levels.",
                axes=names,
                levels=sizes,
                hint="Give one name for each level of nesting.",
            )
        _check_names(names)
        _check_size(names, sizes)
        if len(set(names)) < len(names):
            raise MeshError(
                "a mesh axis name is given twice.", axes=names, hint="Name each axis once."
            )
        if len(set(flat)) < len(flat):
            twice = min(rank for rank, count in Counter(flat).items() if count > 1)
            raise MeshError(
                f"rank {twice} is in the mesh twice.",
                ranks=nested,
                hint="A rank has one place in a mesh.",
            )
        if flat and min(flat) < 0:
            raise MeshError(f"{min(flat)} is not a rank.", hint="Ranks count from 0.")
        natural = range(len(flat))
        order = natural if flat == list(natural) else tuple(flat)
        if isinstance(order, range):
            return cls(**dict(zip(names, sizes, strict=True)))
        made = cls.__new__(cls)
        made.__attrs_init__(names, sizes, order)  # type: ignore[attr-defined]
        return intern(made)

    @classmethod
    def from_device_mesh(cls, device_mesh: Any) -> Mesh:
        """The mesh of a torch DeviceMesh; axes without names are called `dim_0`, `dim_1`, ..."""
        ranks = device_mesh.mesh
        names = device_mesh.mesh_dim_names or tuple(f"dim_{i}" for i in range(ranks.ndim))
        return cls.from_ranks(ranks.tolist(), tuple(names))

    @property
    def size(self) -> int:
        """How many ranks the mesh has."""
        return len(self.order)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank, row-major."""
        return tuple(self.order)

    @property
    def ndim(self) -> int:
        """How many axes the mesh has."""
        return len(self.axes)

    def coord(self, rank: int) -> Coord | None:
        """The place of `rank`, or None where the mesh does not have it."""
        place = self.position(rank)
        if place is None:
            return None
        coord: list[int] = []
        for size in reversed(self.sizes):
            place, index = divmod(place, size)
            coord.append(index)
        return tuple(reversed(coord))

    def position(self, rank: int) -> int | None:
        """The place of `rank` in `ranks`, or None where the mesh does not have it."""
        if isinstance(self.order, range):
            return rank if 0 <= rank < len(self.order) else None
        return _positions(self).get(rank)

    def rank_at(self, coord: Sequence[int]) -> int:
        """The rank at `coord`."""
        place = 0
        for size, index in zip(self.sizes, coord, strict=True):
            place = place * size + index
        return self.order[place]

    def axis(self, name: str) -> int:
        """The index of the axis called `name`; raises `MeshError` where there is none."""
        try:
            return self.axes.index(name)
        except ValueError:
            raise MeshError(
                f"the mesh has no axis {name!r}.",
                mesh=self,
                hint=f"Its axes are {_list(self.axes)}.",
            ) from None

    def axis_size(self, name: str) -> int:
        """How many ranks the axis called `name` has."""
        return self.sizes[self.axis(name)]

    def coset(self, axes: Sequence[str], coord: Coord) -> tuple[int, ...]:
        """The ranks that differ from the one at `coord` in `axes` only, the last axis fastest."""
        place = list(coord)
        return tuple(
            self.rank_at(_put(place, indices, self, axes)) for indices in self.indices(axes)
        )

    def indices(self, axes: Sequence[str]) -> Iterator[Coord]:
        """Every coordinate along `axes`, the last one fastest."""
        coords: list[Coord] = [()]
        for axis in axes:
            coords = [(*c, i) for c in coords for i in range(self.axis_size(axis))]
        return iter(coords)

    if TYPE_CHECKING:  # `layout.py` gives it

        def layout(
            self,
            *dims: str | Sequence[str] | None,
            partial: Mapping[str, str] | None = None,
        ) -> Layout: ...

    def __repr__(self) -> str:
        if isinstance(self.order, range) and all(map(_is_keyword, self.axes)):
            return (
                f"Mesh({', '.join(f'{a}={n}' for a, n in zip(self.axes, self.sizes, strict=True))})"
            )
        return f"Mesh.from_ranks({_nested(list(self.order), self.sizes)}, {self.axes!r})"


def _check_names(axes: Sequence[object]) -> None:
    for name in axes:
        if not isinstance(name, str) or not name or not name.isprintable():
            raise MeshError(f"{name!r} is no name for a mesh axis.", hint="Use a short string.")


def _check_size(axes: Sequence[str], sizes: Coord) -> None:
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


def _is_keyword(axis: str) -> bool:
    """Whether the name can be written as that of a keyword argument."""
    return axis.isascii() and axis.isidentifier() and not keyword.iskeyword(axis)


def _size(axis: str, size: object) -> int:
    try:
        count = integer(size)
    except (TypeError, AttributeError):
        count = 0
    if count < 1:
        raise MeshError(
            f"mesh axis {axis!r} has size {size!r}.", hint="A size is an int, 1 or more."
        )
    return count


def _flatten(level: object, whole: object) -> tuple[Coord, list[int]]:
    """The sizes and the ranks of nested lists that must be regular."""
    if not (is_list(level) or is_tuple(level) or isinstance(level, range)):
        try:
            return (), [integer(level)]
        except (TypeError, AttributeError):
            raise MeshError(
                f"{level!r} is not a rank.", ranks=whole, hint="Ranks are ints."
            ) from None
    parts = [_flatten(entry, whole) for entry in level]
    shapes = {sizes for sizes, _ in parts}
    if len(shapes) != 1:
        raise MeshError(
            "the ranks do not form a regular array." if parts else "a mesh axis has no ranks.",
            ranks=whole,
            hint="Every row must have the same length, 1 or more.",
        )
    return (len(parts), *shapes.pop()), [rank for _, flat in parts for rank in flat]


def mesh_of(axes: Sequence[str], sizes: Coord, order: Sequence[int]) -> Mesh:
    """The mesh with these axes, sizes, and row-major ranks in `order`."""
    _check_size(axes, sizes)
    if order == range(prod(sizes)):
        return Mesh(**dict(zip(axes, sizes, strict=True)))
    return Mesh.from_ranks(_nested(list(order), sizes), axes)


def _nested(flat: list[int], sizes: Sequence[int]) -> Any:
    if not sizes:
        return flat[0]
    step = len(flat) // sizes[0]
    return [_nested(flat[i * step : (i + 1) * step], sizes[1:]) for i in range(sizes[0])]


def _put(place: list[int], indices: Coord, mesh: Mesh, axes: Sequence[str]) -> list[int]:
    for axis, index in zip(axes, indices, strict=True):
        place[mesh.axis(axis)] = index
    return place


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) if names else "none"


@functools.lru_cache(maxsize=256)
def _positions(mesh: Mesh) -> dict[int, int]:
    return {rank: place for place, rank in enumerate(mesh.order)}
