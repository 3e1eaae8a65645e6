"""The lower bound: the bytes that no plan from one type to another can be below."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from fdtensor.layouts.blocks import length, whole
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collectives import scalable
from fdtensor.plans.counts import Count, axes_of, most, shared, summed, table, to_receive
from fdtensor.plans.meetings import few_enough, received_and_sent
from fdtensor.plans.movement import movement
from fdtensor.plans.normal_type import NormalType, normalized, overlaps

__all__ = ["least_total", "lower_bound"]


def lower_bound(src: TensorType, dst: TensorType) -> int:
    """The bytes that no plan can be below: of the busiest rank, with reductions of the mean rank.

    For movement a rank must receive what it lacks of its block. With reductions see `least_total`.
    """
    if src.numel and _is_movement(normalized(src), normalized(dst)):
        return most(to_receive(movement(src, dst))) * src.dtype.itemsize
    ranks = src.mesh.size
    if src.mesh is not dst.mesh:
        ranks = len({*src.mesh.order, *dst.mesh.order})
    return least_total(src, dst) // ranks


@remembered(4096)
def least_total(src: TensorType, dst: TensorType) -> int:
    """The bytes that all ranks together must receive where the terms of an element meet at a rank.

    No plan that makes no new terms receives fewer. Terms that stay where they are, and of which
    only the names of the axes change, are taken to meet.

    An element with t pending terms that k wanters want needs t + k - 1 transfers, one less if a
    wanter holds a term. A wanter is a rank, or all ranks that share new pending terms, one of which
    must get the element.
    """
    a, b = normalized(src), normalized(dst)
    itemsize = src.dtype.itemsize
    if src.numel == 0:
        return 0
    if _is_movement(a, b):
        return summed(dst.mesh.sizes, to_receive(movement(src, dst))) * itemsize
    if src.mesh is not dst.mesh:
        if few_enough(src, dst):
            return received_and_sent(src, dst)[0].total() * itemsize
        return _cross_bound(src, dst, a, b)
    reduced = _reduced(a, b)
    adding = [i for i in b.partial if not _kept(a, b, i)]
    sizes = src.mesh.sizes
    cosets = prod(sizes[i] for i in b.partial if i in a.partial and i not in reduced)
    wanters = prod(sizes[i] for i in b.free) * cosets
    if adding and dst.layout.partial[dst.mesh.axes[adding[0]]] == "avg":  # all of them want it
        wanters *= prod(sizes[i] for i in adding)
        adding = []
    numel = prod(a.shape)
    if reduced:
        terms = prod(sizes[i] for i in reduced)
        total = numel * (cosets * (terms - 1) + wanters) - cosets * _terms_at_wanter(a, b)
    else:
        total = numel * wanters - _already_held(a, b, adding)
    return total * itemsize


def _is_movement(a: NormalType, b: NormalType) -> bool:
    """Whether no terms are reduced and none are added."""
    return not _reduced(a, b) and all(_kept(a, b, i) for i in b.partial)


def _kept(a: NormalType, b: NormalType, axis: int) -> bool:
    """Whether an axis may keep its pending terms, as sums that become averages in place do."""
    if a.mesh is not b.mesh or axis not in a.partial or axis not in b.partial:
        return False
    ops = {a.type.layout.placements[axis], b.type.layout.placements[axis]}
    return len(ops) == 1 or scalable(a.type, b.type)


def _reduced(a: NormalType, b: NormalType) -> list[int]:
    return [i for i in a.partial if not _kept(a, b, i)]


def _terms_at_wanter(a: NormalType, b: NormalType) -> int:
    """The elements for which some rank both holds a term and wants the result."""
    both = sorted(a.cut_axes & b.cut_axes)
    return summed(_spread(a, both), _common(a, b, both))


def _common(a: NormalType, b: NormalType, axes: Sequence[int]) -> Count:
    """How many elements ranks along `axes` have in both types, by the blocks of all others."""
    total = np.ones((1,) * a.mesh.ndim, np.int64)
    for d in range(len(a.shape)):
        total = total * _common_indices(a, b, d, axes)
    return total


def _common_indices(a: NormalType, b: NormalType, d: int, axes: Sequence[int]) -> Count:
    """The same of the indices of dim `d`."""
    cutting = axes_of((a, d), (b, d))
    each = shared(a, b, d)
    if each is not None:
        rest = np.sum(each, axis=tuple({*cutting}.difference(axes)), keepdims=True)
        return rest.astype(np.int64 if prod(a.shape) * a.mesh.size < 1 << 62 else np.object_)

    def common(c: list[int]) -> int:
        fixed = {axis: c[axis] for axis in axes}
        return sum(
            length(part)
            for _, held in overlaps(a.cuts[d], whole(a.shape[d]), whole(a.shape[d]), fixed)
            for _, part in overlaps(b.cuts[d], whole(b.shape[d]), held, fixed)
        )

    return table(a, [axis for axis in cutting if axis in axes], common)


def _spread(here: NormalType, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(size if i in axes else 1 for i, size in enumerate(here.mesh.sizes))


def _already_held(a: NormalType, b: NormalType, adding: Sequence[int]) -> int:
    """The wanted elements that some rank of the wanting ones holds, over all wanters."""
    kept = [i for i in b.partial if _kept(a, b, i)]
    fixed_axes = [i for i in range(a.mesh.ndim) if i not in adding and i not in kept]
    return summed(_spread(a, [*fixed_axes, *kept]), _common(a, b, fixed_axes))


def _cross_bound(src: TensorType, dst: TensorType, a: NormalType, b: NormalType) -> int:
    """As above between large meshes, where some wanter of each element is taken to hold a term."""
    terms = prod(src.mesh.sizes[i] for i in a.partial)
    added = prod(dst.mesh.sizes[i] for i in b.partial)
    repeated = any(op == "avg" for op in dst.layout.partial.values())
    wanters = prod(dst.mesh.sizes[i] for i in b.free) * (added if repeated else 1)
    apart = set(src.mesh.order).isdisjoint(dst.mesh.order)
    if terms > 1:
        total = prod(a.shape) * (terms + wanters - 1 - (not apart))
    else:
        total = prod(a.shape) * wanters if apart else 0
    return total * src.dtype.itemsize
