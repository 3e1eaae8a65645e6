"""The holders of indices: the dims of a type as runs with their coordinates; ranks as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod

import attrs

from fdtensor.layouts.blocks import Intervals, cut, length, whole
from fdtensor.layouts.mesh import Coord, Mesh
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType

__all__ = [
    "Dim",
    "Run",
    "dims_of",
    "empty_ranks",
    "mesh_text",
    "most_nbytes",
    "name_of",
    "ranks_text",
    "short",
    "terms_of",
]


@attrs.frozen
class Run:
    """Indices `start` to `stop` of a dim, held at the same coordinates along the axes that cut it.

    One coordinate, but for the ranges of operands, which may overlap or leave holes.
    """

    start: int
    stop: int
    coords: tuple[Coord, ...]


@attrs.frozen
class Dim:
    """A dim of a type: its runs in ascending order, and the coordinates that hold none of it."""

    size: int
    axes: tuple[str, ...]
    runs: tuple[Run, ...]
    empty: frozenset[Coord]
    most: int
    """How many indices the largest part has."""


@remembered(256)
def dims_of(type: TensorType) -> tuple[Dim, ...]:
    """The dims of a type."""
    return tuple(_dim(type, d) for d in range(len(type.shape)))


def _dim(type: TensorType, d: int) -> Dim:
    size, axes, mesh = type.shape[d], type.layout.cuts(d), type.mesh
    parts: list[tuple[Coord, Intervals]] = [((), whole(size))]
    for axis in axes:
        count, placement = mesh.axis_size(axis), type.layout[axis]
        parts = [
            ((*coord, i), cut(intervals, placement, count, i))  # type: ignore[arg-type]
            for coord, intervals in parts
            for i in range(count)
        ]
    pieces = sorted((a, b, coord) for coord, intervals in parts for a, b in intervals)
    apart = all(this[1] <= later[0] for this, later in pairwise(pieces))
    runs = [Run(a, b, (c,)) for a, b, c in pieces] if apart else _swept(pieces)
    return Dim(
        size,
        axes,
        tuple(_with_holes(runs, size)),
        frozenset(coord for coord, intervals in parts if not intervals),
        max(length(intervals) for _, intervals in parts),
    )


def _swept(pieces: Sequence[tuple[int, int, Coord]]) -> list[Run]:
    """The runs of pieces that overlap."""
    bounds = sorted({bound for a, b, _ in pieces for bound in (a, b)})
    runs = []
    for a, b in pairwise(bounds):
        coords = tuple(c for low, high, c in pieces if low <= a and b <= high)
        if coords:
            runs.append(Run(a, b, coords))
    return runs


def _with_holes(runs: Iterable[Run], size: int) -> Iterable[Run]:
    reached = 0
    for run in runs:
        if run.start > reached:
            yield Run(reached, run.start, ())
        yield run
        reached = run.stop
    if reached < size:
        yield Run(reached, size, ())


def most_nbytes(type: TensorType) -> int:
    """The bytes of the largest block."""
    return prod(dim.most for dim in dims_of(type)) * type.dtype.itemsize


def empty_ranks(type: TensorType) -> list[int]:
    """The ranks that hold no element, in the order of the mesh."""
    mesh = type.mesh
    lacking = [(tuple(map(mesh.axis, dim.axes)), dim.empty) for dim in dims_of(type) if dim.empty]
    if not lacking:
        return []
    ranks = []
    for coord, rank in zip(mesh.indices(mesh.axes), mesh.order, strict=True):
        if any(tuple(coord[i] for i in axes) in empty for axes, empty in lacking):
            ranks.append(rank)
    return ranks


def terms_of(type: TensorType) -> list[tuple[str, Coord]]:
    """The pending axes with their coordinates, one for each term: `("tp=0", (0,))`."""
    axes = tuple(type.layout.partial)
    return [(name_of(axes, coord), coord) for coord in type.mesh.indices(axes)]


def name_of(axes: Sequence[str], coord: Coord) -> str:
    """Coordinates as text: `dp=0,tp=1`."""
    return ",".join(f"{axis}={index}" for axis, index in zip(axes, coord, strict=True))


def ranks_text(ranks: Sequence[int]) -> str:
    """Ascending ranks as text: `0-3`, `0,4`, `0,4..28`, `0-1,8-9..56-57`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    if len(runs) <= 2:
        return ",".join(texts)
    steps = {b[0] - a[0] for a, b in pairwise(runs)}
    if len(steps) == 1 and len({b - a for a, b in runs}) == 1:
        return f"{texts[0]},{texts[1]}..{texts[-1]}" if len(runs) > 3 else ",".join(texts)
    if len(runs) <= 6:
        return ",".join(texts)
    return f"{','.join(texts[:4])} and {sum(b - a + 1 for a, b in runs[4:])} more"


def short(ranks: Sequence[int], most: int = 11) -> str:
    """Ranks as text of at most so many characters: `0 (x64)` is rank 0 and 63 others."""
    text = ranks_text(ranks)
    return text if len(text) <= most else f"{ranks[0]} (x{len(ranks)})"


def mesh_text(mesh: Mesh) -> str:
    """A mesh as it is written; one of many listed ranks by its axes."""
    text = repr(mesh) if isinstance(mesh.order, range) or mesh.size <= 64 else ""
    if 0 < len(text) <= 72:
        return text
    axes = ", ".join(f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True))
    return f"{mesh.size} ranks as ({axes})"
