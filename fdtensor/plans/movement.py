"""`Movement`: between which ranks pieces go when a tensor goes from one type to another.

Each source block may be held by several ranks. An axis that is free on both sides is *paired*: a
rank sends to its own coordinate there only. Over the other free axes of the source the replicas
share the work: each sends one part of the block. So every piece has one sender, and a rank receives
exactly what it lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import attrs

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Shard, Spans
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.normal_type import Cuts, NormalType, dim_to_cut, normalized

__all__ = ["Movement", "common_axes", "movement"]


@attrs.frozen(eq=False)
class Movement:
    """Between which ranks pieces may go."""

    src: NormalType
    dst: NormalType
    assigned: NormalType
    """The source, cut further by the free axes that are not paired: what each rank is to send."""
    pairs: tuple[tuple[int, int], ...]
    """Source and destination axes on which a rank sends to its own coordinate only."""
    reduced: tuple[int, ...]
    """The source axes whose pending terms are reduced."""
    axes: tuple[int, ...] | None
    """The axes along which pieces move; None when the meshes differ."""

    @property
    def same_mesh(self) -> bool:
        return self.src.mesh is self.dst.mesh

    @property
    def terms(self) -> int:
        """How many terms of each element are reduced; 1 for pure movement."""
        return prod(self.src.mesh.sizes[axis] for axis in self.reduced)

    @property
    def identity(self) -> list[int]:
        """The source axes on which ranks agree exactly when they hold the same block and term."""
        return [*self.src.cut_axes, *self.reduced]


@remembered(4096)
def movement(src_type: TensorType, dst_type: TensorType) -> Movement:
    """The movement between types of one shape and dtype.

    Axes that are partial in both keep their terms; the other partial axes of the source are
    reduced, and `dst_type` may not add any. Blocks that overlap stay as they are in both.
    """
    src, dst = normalized(src_type), normalized(dst_type)
    if src.mesh is dst.mesh:
        pairs, axes, kept = _paired_on_one_mesh(src, dst)
    else:
        pairs, axes = _paired_by_size(src, dst), None
        kept: set[int] = set()
    paired = {a for a, _ in pairs}
    sharing = [a for a in src.free if a not in paired]
    return Movement(
        src,
        dst,
        _assigned(src, dst, sharing),
        tuple(pairs),
        tuple(a for a in src.partial if a not in kept),
        axes,
    )


def _paired_on_one_mesh(
    src: NormalType, dst: NormalType
) -> tuple[list[tuple[int, int]], tuple[int, ...], set[int]]:
    """The pairs of axes, the axes along which pieces move, and those whose terms stay pending."""
    pairs = [(a, a) for a in src.free if a in dst.free or _sliced(src, dst, a)]
    kept = set(src.partial) & set(dst.partial)
    pairs += [(a, a) for a in sorted(kept)]
    outer = {a for common in map(common_axes, src.cuts, dst.cuts) for a in common}
    placements = src.type.layout.placements
    # blocks that overlap are paired, else several ranks would send the same
    pairs += [(a, a) for a in sorted(outer) if isinstance(placements[a], Spans)]
    still = {a for a, _ in pairs} | outer
    axes = tuple(a for a, size in enumerate(src.mesh.sizes) if size > 1 and a not in still)
    return pairs, axes, kept


def _paired_by_size(src: NormalType, dst: NormalType) -> list[tuple[int, int]]:
    """Free axes of two meshes, in pairs of the same size."""
    pairs: list[tuple[int, int]] = []
    rest = list(dst.free)
    for a in src.free:
        b = next((b for b in rest if dst.mesh.sizes[b] == src.mesh.sizes[a]), None)
        if b is not None:
            rest.remove(b)
            pairs.append((a, b))
    return pairs


def _assigned(src: NormalType, dst: NormalType, sharing: Sequence[int]) -> NormalType:
    """The source with each block cut among its replicas along the axes that share the work."""
    if not src.type.shape:  # its one element is cut as a dim of 1
        cuts = (tuple((a, src.mesh.sizes[a], Shard(0)) for a in sharing),)
        return attrs.evolve(src, cuts=cuts, cut_axes=frozenset(sharing), free=(), memo={})
    layout: Layout = src.type.layout
    dims = {axis: d for d, cuts in enumerate(dst.cuts) for axis, _, _ in cuts}
    for a in sharing:
        wanted = dims.get(a) if src.mesh is dst.mesh else None
        dim = dim_to_cut(src.type.with_layout(layout), a, wanted)
        layout = layout.split(src.mesh.axes[a], dim)
    return normalized(src.type.with_layout(layout))


def _sliced(src: NormalType, dst: NormalType, axis: int) -> bool:
    """Whether the destination only cuts further, with `axis`, what the source already holds."""
    return any(
        cuts[: len(outer)] == outer and any(a == axis for a, _, _ in cuts)
        for outer, cuts in zip(src.cuts, dst.cuts, strict=True)
    )


def common_axes(src: Cuts, dst: Cuts) -> list[int]:
    """The axes of the outer cuts that both have."""
    axes: list[int] = []
    for a, b in zip(src, dst, strict=False):  # as many as both have
        if a != b:
            break
        axes.append(a[0])
    return axes
