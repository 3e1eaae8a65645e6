"""The layouts that torch placements mean, and the placements that say a layout.

torch writes the blocks of nested cuts in three ways, the last of which only its spec tells from the
first; all agree where the cuts are even:

    Shard, _StridedShard         cut from left to right       Shard, StridedShard here
    Shards and a shard_order     cut in that order            the order of a Layout
    _StridedShard for an order   what FSDP over TP has        the order of a Layout
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Placement, Ragged, Replicate, Shard, StridedShard
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import spec_of, strided_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor as TorchDTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

__all__ = ["layout_from_torch", "layout_to_torch", "same_blocks", "types_of", "widened"]


def layout_from_torch(
    device_mesh: DeviceMesh,
    placements: Sequence[TorchPlacement],
    shape: Sequence[int],
    shard_order: Iterable[tuple[int, Sequence[int]]] | None = None,
    *,
    use_strided_shard_as_shard_order: bool = True,
) -> Layout:
    """The layout that torch means by these fields of a `DTensorSpec`, for a tensor of `shape`.

    Strided shards that stand for a shard order give a layout with that order, as they do in
    torch's redistribution; others give StridedShards. Raises `LayoutError` for other placements.
    """
    mesh = Mesh.from_device_mesh(device_mesh)
    known = _known(mesh, placements, len(shape))
    return _readings(mesh, known, shard_order, use_strided_shard_as_shard_order)[0]


def layout_to_torch(type: TensorType) -> tuple[tuple[TorchPlacement, ...], bool]:
    """The torch placements that give every rank its block of `type`, and how torch must read them.

    The second is `use_strided_shard_as_shard_order` of the `DTensorSpec`: True, as it is by
    default, but where strided shards stand for no order of axes. An order is written with
    `_StridedShard`, since ops of torch 2.13 lose a `shard_order`. Raises `LayoutError`, which names
    the nearest layout, where there are no such placements.
    """
    from torch.distributed.tensor import placement_types as there

    placements, by_order = _written(type)
    written: list[TorchPlacement] = []
    for placement in placements:
        match placement:
            case StridedShard(dim, factor):
                written.append(strided_shard()(dim, split_factor=factor))
            case Shard(dim):
                written.append(there.Shard(dim))
            case Partial(reduce_op):
                written.append(there.Partial(reduce_op))
            case _:
                written.append(there.Replicate())
    return tuple(written), by_order


def _known(mesh: Mesh, placements: Sequence[Any], ndim: int) -> list[Placement]:
    """The placements, one by one, as those of this library."""
    from torch.distributed.tensor import placement_types as there

    def dim(placement: Any) -> int:
        if not -ndim <= placement.dim < ndim:
            raise LayoutError(
                f"{placement!r} cuts dim {placement.dim} of a tensor that has {ndim} dims.",
                placements=tuple(placements),
                mesh=mesh,
                hint="A torch placement counts dims from the front, or from the back below 0.",
            )
        return placement.dim % ndim

    known: list[Placement] = []
    for placement in placements:
        if isinstance(placement, strided_shard()):
            known.append(StridedShard(dim(placement), int(placement.split_factor)))
        elif isinstance(placement, there.Shard):
            known.append(Shard(dim(placement)))
        elif isinstance(placement, there.Replicate):
            known.append(Replicate())
        elif type(placement) is there.Partial:  # its subclasses do more than reduce
            known.append(Partial(placement.reduce_op))  # type: ignore[arg-type]
        else:
            raise LayoutError(
                f"{placement!r} has no counterpart here: its local tensors alone do not say what "
                "the tensor is.",
                placements=tuple(placements),
                mesh=mesh,
                hint="Redistribute it in torch first, to Replicate or Shard.",
            )
    return known


def _readings(
    mesh: Mesh,
    placements: Sequence[Placement],
    shard_order: Iterable[tuple[int, Sequence[int]]] | None,
    by_order: bool,
) -> list[Layout]:
    """The layouts that may be meant, the one that torch's redistribution takes first."""
    order = {dim: [mesh.axes[i] for i in axes] for dim, axes in shard_order or ()}
    literal = Layout(mesh, placements, order)
    strided = any(isinstance(placement, StridedShard) for placement in placements)
    decoded = _decoded(mesh, placements) if strided and by_order else None
    return [decoded, literal] if decoded is not None else [literal]


def _decoded(mesh: Mesh, placements: Sequence[Placement]) -> Layout | None:
    """The layout with the order of axes that the strided shards stand for, or None for no order.

    A split factor is the number of blocks that the axes to the right made before: from right to
    left, each axis comes after those whose sizes multiply to its factor.
    """
    order: dict[int, list[int]] = {}
    plain = list(placements)
    for i in reversed(range(mesh.ndim)):
        placement = placements[i]
        if not isinstance(placement, (Shard, StridedShard)):
            continue
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        axes = order.setdefault(placement.dim, [])
        place, blocks = 0, 1
        while blocks != factor and place < len(axes):
            blocks *= mesh.sizes[axes[place]]
            place += 1
        if blocks != factor:
            return None
        axes.insert(place, i)
        plain[i] = Shard(placement.dim)
    return Layout(mesh, plain, {dim: [mesh.axes[i] for i in axes] for dim, axes in order.items()})


@remembered(4096)
def _written(type: TensorType) -> tuple[tuple[Placement, ...], bool]:
    """Placements in words that torch has, and whether their strided shards stand for an order."""
    mesh, layout = type.mesh, type.layout
    placements = list(layout.placements)
    for axis, placement in enumerate(placements):
        match placement:
            case Ragged(dim):
                placements[axis] = Shard(dim)  # right where its sizes are those of a Shard
            case Shard(dim):
                cuts = [mesh.axis(name) for name in layout.cuts(dim)]
                before = [i for i in cuts[: cuts.index(axis)] if i > axis]
                factor = prod(mesh.sizes[i] for i in before)
                placements[axis] = StridedShard(dim, factor) if factor > 1 else placement
            case _:
                pass
    decoded, literal = _decoded(mesh, placements), Layout(mesh, placements)
    for reading, by_order in ((decoded, True), (literal, False)):
        if reading is not None and same_blocks(type, type.with_layout(reading)):
            return tuple(placements), by_order
    raise LayoutError(
        f"no placements of torch describe the blocks of {type}.",
        layout=layout,
        mesh=mesh,
        hint=f"Redistribute it first, to {decoded or literal!r}.",
    )


def same_blocks(a: TensorType, b: TensorType) -> bool:
    return a is b or all(a.box(coord) == b.box(coord) for coord in a.mesh.indices(a.mesh.axes))


def types_of(dtensor: TorchDTensor, mesh: Mesh) -> list[TensorType]:
    """The types that the spec of a torch DTensor may mean, by different blocks."""
    spec = spec_of(dtensor)
    by_order = getattr(spec, "use_strided_shard_as_shard_order", True)
    known = _known(mesh, spec.placements, dtensor.ndim)
    readings = _readings(mesh, known, getattr(spec, "shard_order", None), by_order)
    types = [TensorType(dtensor.shape, dtensor.dtype, layout) for layout in readings]
    return types[:1] if same_blocks(types[0], types[-1]) else types


def widened(type: TensorType, mesh: Mesh) -> TensorType | None:
    """The type on `mesh`, replicated along the axes that its own mesh, a sub-mesh, has not.

    None where its mesh is none: the axes of a sub-mesh have the names that they have in `mesh`.
    """
    own, layout = type.mesh, type.layout
    if own is mesh:
        return type
    coord = mesh.coord(own.order[0])
    if coord is None or not set(own.axes) <= set(mesh.axes):
        return None
    if own.ranks != mesh.coset(own.axes, coord):
        return None
    placements = [layout[axis] if axis in own.axes else Replicate() for axis in mesh.axes]
    order = {d: layout.cuts(d) for d in range(len(type.shape)) if layout.cuts(d)}
    return type.with_layout(Layout(mesh, placements, order))
