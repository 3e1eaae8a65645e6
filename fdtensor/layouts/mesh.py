"""`Mesh`: named axes over ranks. A value: no process group, no device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any

import attrs

from fdtensor.layouts.errors import MeshError
from fdtensor.layouts.expected import no_device_mesh, no_rank
from fdtensor.layouts.kinds import is_mapping
from fdtensor.layouts.mesh_fields import (
    Coord,
    Links,
    check_names,
    check_size,
    flattened,
    is_keyword,
    links_of,
    listed,
    nested,
    no_axis_names,
    no_coord,
    size_of,
)
from fdtensor.layouts.record import Record, intern
from fdtensor.layouts.remembered import remembered

if TYPE_CHECKING:
    from fdtensor.layouts.layout import Layout

__all__ = ["Coord", "Mesh", "mesh_of"]


@attrs.frozen(eq=False, repr=False, init=False)
class Mesh(Record):
    """Ranks arranged along named axes: `Mesh(dp=2, tp=4)` holds ranks 0 to 7, row-major.

    `Mesh.from_ranks` takes ranks in any arrangement, `Mesh.from_device_mesh` a torch DeviceMesh.
    `links` names what connects the ranks along some axes: "nvlink", "infiniband" or "ethernet", by
    which collectives along them are priced; an axis may still be called so, with its int.
    Raises `MeshError` for a size under 1, a name twice, a rank twice, a negative rank, more than
    32 axes or 2**63 ranks, and for links of other names or axes.

    >>> pods = Mesh(pod=2, gpu=8, links={"pod": "infiniband", "gpu": "nvlink"})
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
    links: Links = ()
    """The axes of which it is known what connects their ranks, each with the name of the link."""

    if TYPE_CHECKING:

        def __init__(self, *, links: Mapping[str, str] | int = ..., **sizes: int) -> None: ...

    else:

        def __init__(self, /, *args: object, **sizes: int) -> None:
            if args:
                raise MeshError(
                    "a mesh takes its axes by name.",
                    got=f"Mesh({', '.join(map(repr, args))})",
                    hint="Write Mesh(dp=2, tp=4), or Mesh.from_ranks([[0, 1]], ('dp', 'tp')).",
                )
            links = sizes.pop("links") if is_mapping(sizes.get("links")) else None
            check_names(tuple(sizes))
            axes, counts = tuple(sizes), tuple(size_of(a, n) for a, n in sizes.items())
            check_size(axes, counts)
            self.__attrs_init__(axes, counts, range(prod(counts)), links_of(axes, links))

        # what is not refused
        __init__.__signature__ = signature(lambda self, *, links={}, **sizes: None)

    @classmethod
    def _make(
        cls, axes: Sequence[str], sizes: Coord, order: Sequence[int], links: Links = ()
    ) -> Mesh:
        """The mesh with these fields, as a pickle has them."""
        return mesh_of(axes, sizes, order, dict(links))

    @classmethod
    def from_ranks(
        cls, ranks: Any, axes: Sequence[str] | str, *, links: Mapping[str, str] | None = None
    ) -> Mesh:
        """The mesh of `ranks`: a nested list or integer tensor with one level for each axis."""
        try:
            names = (axes,) if isinstance(axes, str) else tuple(axes)
        except TypeError:
            raise no_axis_names(axes) from None
        levels = ranks.tolist() if hasattr(ranks, "tolist") else ranks
        sizes, flat = flattened(levels, levels)
        if len(names) != len(sizes):
            raise MeshError(
                f"{len(names)} axis names for ranks with {len(sizes)} levels.",
                axes=names,
                levels=sizes,
                hint="Give one name for each level of nesting.",
            )
        check_names(names)
        check_size(names, sizes)
        if len(set(names)) < len(names):
            raise MeshError(
                "a mesh axis name is given twice.", axes=names, hint="Name each axis once."
            )
        if len(set(flat)) < len(flat):
            twice = min(rank for rank, count in Counter(flat).items() if count > 1)
            raise MeshError(
                f"rank {twice} is in the mesh twice.",
                ranks=levels,
                hint="A rank has one place in a mesh.",
            )
        if flat and min(flat) < 0:
            raise MeshError(f"{min(flat)} is not a rank.", hint="Ranks count from 0.")
        natural = range(len(flat))
        order = natural if flat == list(natural) else tuple(flat)
        made = cls.__new__(cls)
        made.__attrs_init__(names, sizes, order, links_of(names, links))  # type: ignore[attr-defined]
        return intern(made)

    @classmethod
    def from_device_mesh(cls, device_mesh: Any) -> Mesh:
        """The mesh of a torch DeviceMesh; axes without names are called `dim_0`, `dim_1`, ..."""
        if not hasattr(device_mesh, "mesh_dim_names"):
            raise no_device_mesh(device_mesh)
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
        try:
            if isinstance(self.order, range):
                return self.order[rank] if 0 <= rank < len(self.order) else None  # 1.5 has no place
            return _positions(self).get(rank)
        except (TypeError, RuntimeError):  # asked here, it costs those nothing that give an int
            raise no_rank(rank) from None

    def rank_at(self, coord: Sequence[int]) -> int:
        """The rank at `coord`."""
        place = 0
        try:
            for size, index in zip(self.sizes, coord, strict=True):
                if not 0 <= index < size:
                    raise IndexError
                place = place * size + index
            return self.order[place]
        except (TypeError, ValueError, IndexError, RuntimeError):
            raise no_coord(coord, self.axes, self.sizes) from None

    def axis(self, name: str) -> int:
        """The index of the axis called `name`; raises `MeshError` where there is none."""
        try:
            return self.axes.index(name)
        except ValueError:
            raise MeshError(
                f"the mesh has no axis {name!r}.",
                mesh=self,
                hint=f"Its axes are {listed(self.axes)}.",
            ) from None

    def axis_size(self, name: str) -> int:
        """How many ranks the axis called `name` has."""
        return self.sizes[self.axis(name)]

    def coset(self, axes: Sequence[str], coord: Coord) -> tuple[int, ...]:
        """The ranks that differ from the one at `coord` in `axes` only, the last axis fastest."""
        every = self.indices(axes)
        try:
            place = list(coord)
            return tuple([self.rank_at(_put(place, indices, self, axes)) for indices in every])
        except (TypeError, IndexError):
            raise no_coord(coord, self.axes, self.sizes) from None

    def cosets(self, axes: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Each set of ranks that differ in `axes` only, in the order of its first rank."""
        seen: set[int] = set()
        for rank in self.order:
            if rank not in seen:
                ranks = self.coset(axes, self.coord(rank) or ())
                seen.update(ranks)
                yield ranks

    def part(self, axes: Sequence[str], coord: Coord) -> Mesh:
        """The mesh of a coset: `axes` in their order, and their links."""
        ranks = self.coset(axes, coord)
        sizes = tuple([self.axis_size(axis) for axis in axes])
        links = {axis: link for axis, link in self.links if axis in axes}
        return mesh_of(tuple(axes), sizes, ranks, links)

    def indices(self, axes: Sequence[str]) -> Iterator[Coord]:
        """Every coordinate along `axes`, the last one fastest."""
        coords: list[Coord] = [()]
        try:
            for axis in axes:
                coords = [(*c, i) for c in coords for i in range(self.axis_size(axis))]
        except TypeError:
            raise no_axis_names(axes) from None
        return iter(coords)

    if TYPE_CHECKING:  # `layout.py` gives it

        def layout(
            self,
            *dims: str | Sequence[str] | None,
            partial: Mapping[str, str] | None = None,
        ) -> Layout: ...

    def __repr__(self) -> str:
        links = f"links={dict(self.links)!r}" if self.links else ""
        plain = isinstance(self.order, range) and all(map(is_keyword, self.axes))
        if plain and not (links and "links" in self.axes):
            sizes = [f"{a}={n}" for a, n in zip(self.axes, self.sizes, strict=True)]
            return f"Mesh({', '.join([*sizes, links] if links else sizes)})"
        ranks = f"{nested(list(self.order), self.sizes)}, {self.axes!r}"
        return f"Mesh.from_ranks({ranks}{links and ', '}{links})"


def mesh_of(
    axes: Sequence[str], sizes: Coord, order: Sequence[int], links: Mapping[str, str] | None = None
) -> Mesh:
    """The mesh with these axes, sizes, row-major ranks in `order`, and links."""
    check_size(axes, sizes)
    if order == range(prod(sizes)) and not (links and "links" in axes):
        given: dict[str, Any] = {"links": links} if links else {}
        return Mesh(**given, **dict(zip(axes, sizes, strict=True)))
    return Mesh.from_ranks(nested(list(order), sizes), axes, links=links)


def _put(place: list[int], indices: Coord, mesh: Mesh, axes: Sequence[str]) -> list[int]:
    for axis, index in zip(axes, indices, strict=True):
        place[mesh.axis(axis)] = index
    return place


@remembered(256)
def _positions(mesh: Mesh) -> dict[int, int]:
    return {rank: place for place, rank in enumerate(mesh.order)}
