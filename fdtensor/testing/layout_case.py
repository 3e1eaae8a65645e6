"""`LayoutCase`: a type for each tensor of a call, on one mesh, and which settings are smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import attrs
import torch

from fdtensor.layouts.dtypes import reducible
from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import (
    REDUCE_OPS,
    Cut,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    StridedShard,
)
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.runtime.comm import Comm
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.dtensor import DTensor
from fdtensor.testing.strides import CONTIGUOUS, Strides, strided
from fdtensor.testing.values import scatter

__all__ = ["LayoutCase", "alone", "plain", "smaller", "smallest"]


@attrs.frozen
class LayoutCase:
    """A type for each tensor of a call, all on one mesh, and the seed that splits pending terms.

    `strides` says how the blocks of each tensor lie in memory, the same on all ranks.
    """

    types: tuple[TensorType, ...] = attrs.field(converter=tuple)
    seed: int = 0
    strides: tuple[Strides | None, ...] = attrs.field(
        converter=tuple,
        default=attrs.Factory(lambda self: (CONTIGUOUS,) * len(self.types), takes_self=True),
    )

    @property
    def mesh(self) -> Mesh:
        """The mesh that all tensors are on."""
        return self.types[0].mesh

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each tensor."""
        return tuple(t.layout for t in self.types)

    def spread(
        self, tensors: Sequence[torch.Tensor], comm: Comm[Any] | None = None
    ) -> list[DTensor[Any]]:
        """The tensors as DTensors of simulated ranks, pending terms split at random."""
        on = comm or SimulatedComm(self.mesh)
        return [
            DTensor(
                on.value(strided(scatter(tensor.detach(), type, self.seed + i), strides)), type, on
            )
            for i, (tensor, type, strides) in enumerate(
                zip(tensors, self.types, self.strides, strict=True)
            )
        ]

    def with_layouts(self, layouts: Sequence[Layout]) -> LayoutCase:
        """The same tensors under other layouts."""
        pairs = zip(self.types, layouts, strict=True)
        return attrs.evolve(self, types=[t.with_layout(layout) for t, layout in pairs])


def alone(tensors: Sequence[torch.Tensor]) -> LayoutCase:
    """The setting of one rank."""
    whole = Mesh(one=1).layout()
    return LayoutCase([TensorType(tuple(t.shape), t.dtype, whole) for t in tensors])


def plain(
    types: Sequence[tuple[tuple[int, ...], torch.dtype]], mesh: Mesh, pending: bool
) -> list[LayoutCase]:
    """Settings with one placement for all tensors along one axis: rows, columns, terms of a sum.

    What a wrong rule gets wrong first, and draws may miss.
    """
    ways: list[Placement] = [Shard(d) for d in range(max((len(s) for s, _ in types), default=0))]
    ways += [Partial("sum")] * pending
    return [
        LayoutCase([TensorType(s, dt, _along(mesh, axis, way, s, dt)) for s, dt in types])
        for axis in mesh.axes
        for way in ways
        if types
    ]


def _along(
    mesh: Mesh, axis: str, way: Placement, shape: tuple[int, ...], dtype: torch.dtype
) -> Layout:
    """The layout with a placement along an axis, if a tensor can have it."""
    cut = isinstance(way, Shard) and way.dim < len(shape)
    fits = cut or (isinstance(way, Partial) and reducible(dtype, "sum"))
    return mesh.layout().placed(axis, way) if fits else mesh.layout()


def smallest(
    setting: LayoutCase,
    wanted: Callable[[LayoutCase], bool],
    *,
    same_mesh: bool = False,
    most: int = 300,
) -> tuple[LayoutCase, int]:
    """A wanted setting of which no smaller one is wanted, and how many were tried: at most `most`.

    `setting` is wanted. With `same_mesh` the mesh stays.
    """
    tried = 0
    seen = {setting}
    going = True
    while going:
        going = False
        for candidate in smaller(setting, same_mesh):
            if candidate in seen or tried == most:
                continue
            seen.add(candidate)
            tried += 1
            if wanted(candidate):
                setting, going = candidate, True
                break
    return setting, tried


def smaller(setting: LayoutCase, same_mesh: bool = False) -> list[LayoutCase]:
    """Simpler settings, one change away: the boldest changes first."""
    size = _size(setting)
    candidates = (
        _one_change(setting) if same_mesh else (*_of_meshes(setting), *_one_change(setting))
    )
    return [candidate for candidate in dict.fromkeys(candidates) if _size(candidate) < size]


_KINDS = (Replicate, Shard, Partial, StridedShard, Ragged)


def _size(setting: LayoutCase) -> tuple[int, ...]:
    """How large a setting is: ranks, then cuts and terms, axes, uneven blocks, kinds, order."""
    placements = [p for layout in setting.layouts for p in layout.placements]
    ops = [REDUCE_OPS.index(p.reduce_op) for p in placements if isinstance(p, Partial)]
    mesh = setting.mesh
    return (
        mesh.size,
        sum(not isinstance(p, Replicate) for p in placements),
        mesh.ndim,
        sum(map(_uneven, setting.types)),
        sum(_KINDS.index(type(p)) for p in placements if type(p) in _KINDS),
        sum(ops),
        sum(len(layout.order) for layout in setting.layouts),
        mesh.order != range(mesh.size),
        sum(1 + (s.gap > 1) for s in setting.strides if s is not None),
    )


def _uneven(type: TensorType) -> bool:
    return len({type.local_shape(rank) for rank in type.mesh.ranks}) > 1


def _of_meshes(setting: LayoutCase) -> Iterator[LayoutCase]:
    """The setting on a mesh with an axis less, with a shorter one, with ranks in order."""
    mesh = setting.mesh
    for axis in mesh.axes:
        rest = {a: mesh.axis_size(a) for a in mesh.axes if a != axis}
        if rest:
            yield from _on(setting, rest)
        for heir in rest:
            for i in range(len(setting.types)):
                yield from _rebuilt(setting, Mesh(**rest), _moved(setting, i, axis, heir))
            yield from _rebuilt(setting, Mesh(**rest), _moved(setting, None, axis, heir))
    for axis in mesh.axes:
        for size in range(1, mesh.axis_size(axis)):
            yield from _on(
                setting, {a: size if a == axis else mesh.axis_size(a) for a in mesh.axes}
            )
    yield from _on(setting, dict(zip(mesh.axes, mesh.sizes, strict=True)))


def _on(setting: LayoutCase, sizes: dict[str, int]) -> Iterator[LayoutCase]:
    """The setting on a part of its mesh: of ranks from 0, then of those that it has."""
    mesh = setting.mesh
    yield from _rebuilt(setting, Mesh(**sizes), lambda _i, _axis, placement: placement)
    places = [range(sizes.get(axis, 1)) for axis in mesh.axes]
    ranks = [mesh.rank_at(coord) for coord in product(*places)]
    kept = Mesh.from_ranks(torch.tensor(ranks).reshape(*sizes.values()), tuple(sizes))
    yield from _rebuilt(setting, kept, lambda _i, _axis, placement: placement)


def _one_change(setting: LayoutCase) -> Iterator[LayoutCase]:
    """The setting with one placement simpler, or with one order of cuts that of the mesh."""
    mesh = setting.mesh
    for i, strides in enumerate(setting.strides):
        for simpler in (None, strides and attrs.evolve(strides, gap=1)):
            changed = [simpler if i == j else s for j, s in enumerate(setting.strides)]
            yield attrs.evolve(setting, strides=changed)
    for axis in mesh.axes:
        yield from _rebuilt(
            setting, mesh, lambda _, a, p, axis=axis: Replicate() if a == axis else p
        )
    for i, type in enumerate(setting.types):
        for axis, count in zip(mesh.axes, mesh.sizes, strict=True):
            for simpler in _simpler(type.layout[axis], type.shape, count):
                yield from _rebuilt(setting, mesh, _put(i, axis, simpler))
        if type.layout.order:
            with suppress(LayoutError):  # a ragged cut comes first
                plain = Layout(mesh, type.layout.placements)
                layouts = [plain if i == j else t.layout for j, t in enumerate(setting.types)]
                yield setting.with_layouts(layouts)


def _moved(
    setting: LayoutCase, place: int | None, axis: str, heir: str
) -> Callable[[int, str, Placement], Placement]:
    """Gives what `axis` does to a tensor, or to all, to the axis `heir`."""

    def change(i: int, a: str, old: Placement) -> Placement:
        gets = a == heir and place in (None, i)
        own = setting.layouts[i][axis]
        return own if gets and not isinstance(own, Replicate) else old

    return change


def _put(place: int, axis: str, placement: Placement) -> Callable[[int, str, Placement], Placement]:
    """Changes one placement; the pending terms of a tensor have one reduce op."""

    def change(i: int, a: str, old: Placement) -> Placement:
        pending = isinstance(placement, Partial) and isinstance(old, Partial)
        return placement if i == place and (a == axis or pending) else old

    return change


def _simpler(placement: Placement, shape: Sequence[int], count: int) -> list[Placement]:
    """The placements to try instead of one."""
    simpler: list[Placement] = [Replicate()]
    match placement:
        case Shard(dim) | StridedShard(dim) | Ragged(dim):
            simpler += [Shard(dim), *(Shard(d) for d in range(len(shape)) if d != dim)]
        case Partial():
            simpler += map(Partial, REDUCE_OPS)
    if isinstance(placement, Ragged) and shape[placement.dim] % count == 0:
        simpler.append(Ragged(placement.dim, [shape[placement.dim] // count] * count))
    return simpler


def _rebuilt(
    setting: LayoutCase, mesh: Mesh, change: Callable[[int, str, Placement], Placement]
) -> Iterator[LayoutCase]:
    """The setting on a mesh of some of its axes, its placements changed; none if that cannot be."""
    layouts = []
    for i, old in enumerate(setting.layouts):
        placements = {a: _resized(change(i, a, old[a]), mesh.axis_size(a)) for a in mesh.axes}
        order = {}
        for dim in range(len(setting.types[i].shape)):
            cutting = [a for a, p in placements.items() if isinstance(p, Cut) and p.dim == dim]
            before = [a for a in old.cuts(dim) if a in cutting]
            order[dim] = [*before, *(a for a in cutting if a not in before)]
        try:
            layouts.append(Layout(mesh, list(placements.values()), order))
        except LayoutError:
            return
    with suppress(LayoutError):
        yield setting.with_layouts(layouts)


def _resized(placement: Placement, count: int) -> Placement:
    """The placement on an axis of `count` ranks."""
    if isinstance(placement, Ragged) and count != len(placement.sizes):
        sizes = (*placement.sizes, *[0] * count)
        return Ragged(placement.dim, (*sizes[: count - 1], sum(sizes[count - 1 :])))
    return placement
