"""`refined` and `seen_on`: several meshes of the same ranks as one, and layouts of one on another.

Where the ranks have numbers, an axis may step through these by a stride. If all axes do, and their
strides divide each other, a mesh with an axis for each ratio of one stride to the next has all of
them as products of its axes, which are called parts of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, count, pairwise
from math import prod
from operator import mul

import attrs

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh, mesh_of
from fdtensor.layouts.placement import Cut, Placement, Ragged, Replicate, Shard, Spans
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType

__all__ = ["refined", "seen_on"]

Part = tuple[int, int]
"""The stride and the size of an axis among the numbered ranks."""

MOST_RANKS = 4096
"""Up to how many ranks uneven blocks are compared one by one."""


@remembered(256)
def refined(*meshes: Mesh) -> Mesh | None:
    """The coarsest mesh whose axes all axes of these are products of.

    It is one of them where that will do; else its axes are called as theirs, and parts of an axis
    by their number: Mesh(dp_0=2, dp_1=4). None for meshes of other ranks, and where no numbering of
    the ranks lets all axes step evenly.
    """
    if all(mesh is meshes[0] for mesh in meshes):
        return meshes[0]
    numbered = _numbered(meshes)
    if numbered is None:
        return None
    base, axes, parts = numbered
    for mesh, own in zip(meshes, axes, strict=True):
        if sorted(own.values(), reverse=True) == parts:
            return mesh
    names, links = _names(parts, axes), dict(meshes[0].links)
    known = {
        name: links[axis]
        for name, part in zip(names, parts, strict=True)
        for axis, whole in axes[0].items()
        if _within(part, whole) and axis in links
    }
    return mesh_of(names, tuple([n for _, n in parts]), base.order, known)


@remembered(4096)
def seen_on(type: TensorType, mesh: Mesh) -> TensorType | None:
    """The type on another mesh of the same ranks under which each holds the same block.

    None where no layout says so: an axis is cut apart that cuts a dim unevenly, or axes become one
    that place the tensor differently.
    """
    if type.mesh is mesh:
        return type
    numbered = _numbered((type.mesh, mesh))
    if numbered is None:
        return None
    _, axes, parts = numbered
    src, dst = (_Parts.of(m, own, parts) for m, own in zip((type.mesh, mesh), axes, strict=True))
    apart = _apart(type.layout, src)
    layout = None if apart is None else _joined(apart, dst)
    seen = None if layout is None else type.with_layout(layout)
    return seen if seen is not None and _same_blocks(type, seen) else None


_Axes = Mapping[str, Part]


def _numbered(meshes: Sequence[Mesh]) -> tuple[Mesh, list[_Axes], list[Part]] | None:
    """A mesh by whose numbers of the ranks all axes of these step evenly, the axes, and the parts.

    None where it is none of them, nor the ranks in order.
    """
    ranks = sorted(meshes[0].order)
    if any(sorted(mesh.order) != ranks for mesh in meshes[1:]):
        return None
    for base in dict.fromkeys((*meshes, Mesh.from_ranks(ranks, "all"))):
        axes = [own for own in (_axes(mesh, base) for mesh in meshes) if own is not None]
        parts = _parts(axes, base.size)
        if len(axes) == len(meshes) and parts is not None:
            return base, axes, parts
    return None


def _parts(axes: Sequence[_Axes], count: int) -> list[Part] | None:
    """The parts of axes among so many ranks, outermost first; None where they do not divide."""
    ends = {1, count} | {end for own in axes for s, n in own.values() for end in (s, s * n)}
    pairs = list(pairwise(sorted(ends)))
    divide = not any(b % a for a, b in pairs)
    return [(a, b // a) for a, b in pairs][::-1] if divide else None


def _axes(mesh: Mesh, base: Mesh) -> _Axes | None:
    """The axes of a mesh, but for those of size 1, among the numbered ranks of another one."""
    strides = [prod(mesh.sizes[i + 1 :]) for i in range(mesh.ndim)]
    if mesh.order != base.order:
        places = [base.position(rank) for rank in mesh.order]
        strides = [places[s] or 0 if n > 1 else 1 for s, n in zip(strides, mesh.sizes, strict=True)]
        pairs = zip(mesh.indices(mesh.axes), places, strict=True)
        if 0 in strides or any(sum(map(mul, strides, coord)) != at for coord, at in pairs):
            return None
    sides = zip(mesh.axes, strides, mesh.sizes, strict=True)
    return {axis: (stride, size) for axis, stride, size in sides if size > 1}


def _within(part: Part, whole: Part) -> bool:
    """Whether a part is one of those of an axis."""
    return whole[0] <= part[0] < whole[0] * whole[1]


def _names(parts: Sequence[Part], axes: Sequence[_Axes]) -> list[str]:
    """The names of parts: those of axes that are one, where no other axis is called so."""
    taken, names = {a for own in axes for a in own}, list[str]()
    for part in parts:
        same = (a for own in axes for a, whole in own.items() if whole == part)
        clear = (a for a in same if all(own.get(a, part) == part for own in axes))
        base = next(a for a, whole in axes[0].items() if _within(part, whole))
        numbered = (n for k in count() if (n := f"{base}_{k}") not in taken)
        names.append(next(chain(clear, numbered)))
        taken.add(names[-1])
    return names


@attrs.frozen
class _Parts:
    """A mesh and the parts of each axis, outermost first."""

    mesh: Mesh
    of_axis: Mapping[str, Sequence[Part]]

    @classmethod
    def of(cls, mesh: Mesh, axes: _Axes, parts: Sequence[Part]) -> _Parts:
        """The parts of a mesh with these axes."""
        of_axis = {a: [p for p in parts if _within(p, whole)] for a, whole in axes.items()}
        return cls(mesh, {axis: of_axis.get(axis, []) for axis in mesh.axes})


@attrs.frozen
class _Apart:
    """A layout by the parts of its axes."""

    placed: Mapping[Part, Placement]
    cuts: Mapping[int, Sequence[Part]]
    """The parts that cut each dim, outermost first."""


def _apart(layout: Layout, parts: _Parts) -> _Apart | None:
    """A layout by the parts of its axes, as if it were even; None where it says which blocks."""
    pairs = list(zip(parts.mesh.axes, layout.placements, strict=True))
    several = [p for axis, p in pairs if len(parts.of_axis[axis]) > 1]
    if any(isinstance(p, (Ragged, Spans)) for p in several):
        return None
    placed = {k: p for axis, p in pairs for k in parts.of_axis[axis]}
    dims = {p.dim for p in placed.values() if isinstance(p, Cut)}
    cuts = {d: [k for axis in layout.cuts(d) for k in parts.of_axis[axis]] for d in dims}
    return _Apart(placed, cuts)


def _joined(apart: _Apart, parts: _Parts) -> Layout | None:
    """The layout on a mesh, if the parts of each of its axes are placed alike."""
    placements: list[Placement] = []
    for axis in parts.mesh.axes:
        own = parts.of_axis[axis]
        kinds = list(dict.fromkeys(apart.placed[k] for k in own)) or [Replicate()]
        if len(kinds) > 1:
            return None
        if isinstance(kinds[0], Cut) and len(own) > 1:
            cuts = list(apart.cuts[kinds[0].dim])
            at = cuts.index(own[0])
            if cuts[at : at + len(own)] != own or isinstance(kinds[0], (Ragged, Spans)):
                return None
        placements.append(kinds[0])
    cutting = [a for a, p in zip(parts.mesh.axes, placements, strict=True) if isinstance(p, Cut)]
    order = {
        d: [a for k in cuts for a in cutting if parts.of_axis[a][0] == k]
        for d, cuts in apart.cuts.items()
    }
    return Layout(parts.mesh, placements, order)


def _same_blocks(a: TensorType, b: TensorType) -> bool:
    """Whether each rank holds the same block of both."""
    layouts = a.layout, b.layout
    plain = all(
        isinstance(p, Shard) or not isinstance(p, Cut) for x in layouts for p in x.placements
    )
    ways = [[prod(map(x.mesh.axis_size, x.cuts(d))) for d in range(a.ndim)] for x in layouts]
    if plain and all(n % w == 0 for side in ways for n, w in zip(a.shape, side, strict=True)):
        return True
    if a.mesh.size > MOST_RANKS:
        return False
    return all(a.index(rank) == b.index(rank) for rank in a.mesh.order)
