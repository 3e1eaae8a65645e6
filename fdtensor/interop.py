"""`from_torch` and `to_torch`: the doors to `torch.distributed.tensor`, imported when first used.

The local tensor goes through without a copy, and gradients go through in both directions. torch
writes the blocks of nested cuts in three ways, the last of which only its spec tells from the
first; all agree where the cuts are even:

    Shard, _StridedShard         cut from left to right       Shard, StridedShard here
    Shards and a shard_order     cut in that order            the order of a Layout
    _StridedShard for an order   what FSDP over TP has        the order of a Layout
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fdtensor.comm import Check, Comm
from fdtensor.distribution import agree as _agree
from fdtensor.dtensor import DTensor
from fdtensor.errors import CommError, LayoutError, MeshError
from fdtensor.funcol import FuncolComm
from fdtensor.interpreter import run
from fdtensor.layout import Layout, TensorType
from fdtensor.mesh import Mesh
from fdtensor.placement import Partial, Placement, Ragged, Replicate, Shard, StridedShard
from fdtensor.planner import plan
from fdtensor.process_groups import groups, make_group

if TYPE_CHECKING:
    import torch.distributed.tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor as TorchDTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

__all__ = ["from_torch", "layout_from_torch", "layout_to_torch", "to_device_mesh", "to_torch"]


def from_torch(
    dtensor: TorchDTensor, comm: Comm[Any] | None = None, *, check: Check | None = None
) -> DTensor[torch.Tensor]:
    """The DTensor with the same blocks: its local tensor shares the memory of the torch DTensor.

    Differentiable: gradients come back as torch DTensors with Replicate for Partial, also to a
    parameter. Collective, as `from_local` is. `comm` is by default a FuncolComm of the mesh. Raises
    `LayoutError` for placements that have no meaning here, such as the masked partial of an
    embedding, and for a mesh on which torch's own functions disagree about who holds which block.
    """
    from torch.distributed.tensor import DTensor as TorchDTensor

    if not isinstance(dtensor, TorchDTensor):
        raise LayoutError(
            f"got a {type(dtensor).__name__}, not a torch DTensor.",
            hint="Pass a torch.distributed.tensor.DTensor; for plain tensors there are "
            "distribute and from_local.",
        )
    device_mesh = dtensor.device_mesh
    mesh = Mesh.from_device_mesh(device_mesh)
    types = _types(dtensor, mesh)
    if comm is None:
        comm = _comm(mesh, _held(dtensor).device)
    _refuse_simulated(comm)
    _check_groups(device_mesh, types[0])
    _remember(mesh, device_mesh)
    found = _fitting(_held(dtensor), types, comm, check)
    return DTensor(_local(dtensor, found, comm), found, comm)  # type: ignore[call-arg]


def to_torch(dtensor: DTensor[Any], device_mesh: DeviceMesh | None = None) -> TorchDTensor:
    """The torch DTensor with the same blocks: it shares the memory of the local tensor.

    Differentiable. `device_mesh` is by default the one that the mesh came from, else
    `to_device_mesh` of it. The full strides are those of a dense tensor whose dims lie as the local
    ones do: channels last stays so, but on ranks whose block is empty or one channel wide. Raises
    `LayoutError` for blocks that no torch placements describe.
    """
    _refuse_simulated(dtensor.comm)
    type, local = dtensor.type, dtensor.local
    placements, by_order = layout_to_torch(type)
    if device_mesh is None:
        device_mesh = to_device_mesh(type.mesh, local.device.type)
    else:
        _check_match(device_mesh, type.mesh)
        _check_groups(device_mesh, type)
    if device_mesh.get_coordinate() is None:
        local = local.new_empty(0)  # what torch has on a rank outside
    spec = _spec(device_mesh, placements, by_order, type.shape, local)
    if torch.is_grad_enabled() and local.requires_grad:
        return _ToTorch.apply(local, spec, type, dtensor.comm)  # type: ignore[return-value]
    return _wrapped(local.detach(), spec, False)


# --- layouts ---------------------------------------------------------------------------------


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
                written.append(there._StridedShard(dim, split_factor=factor))
            case Shard(dim):
                written.append(there.Shard(dim))
            case Partial(reduce_op):
                written.append(there.Partial(reduce_op))
            case _:
                written.append(there.Replicate())
    return tuple(written), by_order


def _known(mesh: Mesh, placements: Sequence[TorchPlacement], ndim: int) -> list[Placement]:
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
        if isinstance(placement, there._StridedShard):
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


@functools.lru_cache(maxsize=4096)
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
        if reading is not None and _same_blocks(type, type.with_layout(reading)):
            return tuple(placements), by_order
    raise LayoutError(
        f"no placements of torch describe the blocks of {type}.",
        layout=layout,
        mesh=mesh,
        hint=f"Redistribute it first, to {decoded or literal!r}.",
    )


def _same_blocks(a: TensorType, b: TensorType) -> bool:
    return a is b or all(a.box(coord) == b.box(coord) for coord in a.mesh.indices(a.mesh.axes))


# --- local tensors ---------------------------------------------------------------------------


def _types(dtensor: TorchDTensor, mesh: Mesh) -> list[TensorType]:
    """The types that the spec of a torch DTensor may mean, by different blocks."""
    spec = dtensor._spec
    by_order = getattr(spec, "use_strided_shard_as_shard_order", True)
    known = _known(mesh, spec.placements, dtensor.ndim)
    readings = _readings(mesh, known, getattr(spec, "shard_order", None), by_order)
    types = [TensorType(dtensor.shape, dtensor.dtype, layout) for layout in readings]
    return types[:1] if _same_blocks(types[0], types[-1]) else types


def _fitting(
    local: torch.Tensor, types: Sequence[TensorType], comm: Comm[Any], check: Check | None
) -> TensorType:
    """The first type whose local shapes all ranks have; all ranks raise where there is none."""
    if len(types) == 1 or (check or comm.check) == "never":
        _agree("from_torch", types[0], comm, comm.mistake(local, types[0]), check)
        return types[0]
    problem = ""
    for type in types:
        try:
            _agree("from_torch", type, comm, comm.mistake(local, type), check)
            return type
        except CommError as error:
            problem = error.sentence
    raise LayoutError(
        "the blocks of this torch DTensor cannot be written: its uneven strided shards fit neither "
        "as an order of axes nor as cuts from left to right.",
        order=types[0],
        cuts=types[1],
        problem=problem,
        hint="Redistribute it in torch first, to placements without _StridedShard.",
    )


def _held(dtensor: TorchDTensor) -> torch.Tensor:
    """The local tensor itself, arrived."""
    local = dtensor._local_tensor
    wait = getattr(local, "wait", None)  # a collective under way is a tensor with this method
    return local if wait is None else wait()


def _local(dtensor: TorchDTensor, type: TensorType, comm: Comm[Any]) -> torch.Tensor:
    """The local tensor, connected to the torch DTensor where that takes part in autograd."""
    if torch.is_grad_enabled() and dtensor.requires_grad:
        return _FromTorch.apply(dtensor, type, comm)  # type: ignore[return-value]
    return _held(dtensor).detach()


def _wrapped(local: torch.Tensor, spec: Any, requires_grad: bool) -> TorchDTensor:
    from torch.distributed.tensor import DTensor as TorchDTensor

    return TorchDTensor(local, spec, requires_grad=requires_grad)


def _spec(
    device_mesh: DeviceMesh,
    placements: Sequence[TorchPlacement],
    by_order: bool,
    shape: Sequence[int],
    local: torch.Tensor,
) -> Any:
    """The spec of a torch DTensor with this local tensor."""
    from torch.distributed.tensor import placement_types as there
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), _full_stride(local, shape), local.dtype)
    strided = any(isinstance(p, there._StridedShard) for p in placements)
    told: Any = {"use_strided_shard_as_shard_order": False} if strided and not by_order else {}
    return DTensorSpec(device_mesh, tuple(placements), tensor_meta=meta, **told)


def _full_stride(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense full tensor whose dims lie in memory as those of the local one."""
    dims = range(len(shape))
    nested = sorted(dims, key=lambda d: (local.stride(d), -d)) if local.dim() == len(shape) else ()
    strides, step = [0] * len(shape), 1
    for d in nested or reversed(dims):
        strides[d] = step
        step *= max(1, shape[d])
    return tuple(strides)


# --- derivatives -----------------------------------------------------------------------------


class _FromTorch(torch.autograd.Function):
    """The local tensor of a torch DTensor of a type; cotangents go back as its cotangent type."""

    @staticmethod
    def forward(ctx: Any, dtensor: Any, type: TensorType, comm: Any) -> torch.Tensor:
        ctx.device_mesh, ctx.type, ctx.comm = dtensor.device_mesh, type, comm
        ctx.set_materialize_grads(False)
        local = _held(dtensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, None, None
        cotangent = DTensor(grads[0], ctx.type.cotangent(), ctx.comm)  # type: ignore[call-arg]
        return to_torch(cotangent, ctx.device_mesh), None, None


class _ToTorch(torch.autograd.Function):
    """A torch DTensor around a local tensor; cotangents, of any placements, become its type's."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Any, type: TensorType, comm: Any) -> Any:
        ctx.type, ctx.comm = type, comm
        ctx.set_materialize_grads(False)
        return _wrapped(local.view_as(local), spec, local.requires_grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, None, None, None
        comm, wanted = ctx.comm, ctx.type.cotangent()
        held = _types(grads[0], wanted.mesh)[0]
        local = _local(grads[0], held, comm)
        if held.layout.partial or not _same_blocks(held, wanted):
            local = run(plan(held, wanted, cost=comm.cost), local, comm)
        return local, None, None, None


# --- meshes ----------------------------------------------------------------------------------

_ORDERED = "fdtensor_ordered"
"""How the names of groups begin that are in the order of coordinates where ranks do not ascend."""

_ordered: dict[tuple[int, ...], Any] = {}
_device_meshes: dict[tuple[Mesh, str], tuple[Any, DeviceMesh]] = {}
_comms: dict[tuple[Mesh, torch.device], FuncolComm] = {}


def to_device_mesh(mesh: Mesh, device_type: str = "cpu") -> DeviceMesh:
    """The torch DeviceMesh with these axes and ranks: always the same one for a mesh.

    That is the one that a torch DTensor brought, or else one on the groups of `FuncolComm`, made
    by the ranks of the mesh alone. Along axes where ranks do not ascend its groups have the order
    of the coordinates, which those that DeviceMesh makes have not.
    """
    from torch.distributed.device_mesh import DeviceMesh

    found = _device_meshes.get((mesh, device_type))
    if found is not None and found[0] is dist.group.WORLD:
        return found[1]
    if not mesh.ndim:
        raise MeshError(
            "torch has no mesh without axes.", hint="Use a mesh of one axis of one rank."
        )
    ranks = torch.tensor(mesh.ranks, dtype=torch.int).view(mesh.sizes)
    coord = mesh.coord(dist.get_rank())
    if coord is None:
        made = DeviceMesh(device_type, ranks, mesh_dim_names=mesh.axes, _init_backend=False)
    else:
        along = [_group(mesh, axis, mesh.coset([axis], coord)) for axis in mesh.axes]
        made = DeviceMesh.from_group(along, device_type, ranks, mesh_dim_names=mesh.axes)
    _device_meshes[mesh, device_type] = (dist.group.WORLD, made)
    return made


def _group(mesh: Mesh, axis: str, ranks: tuple[int, ...]) -> Any:
    """The process group of these ranks along an axis, in the order of coordinates."""
    name = f"{_ORDERED}_{sha256(repr(ranks).encode()).hexdigest()[:16]}"
    if len(ranks) > 1 and axis not in _descending(mesh):
        (name,) = groups(mesh, axis)
    elif _ordered.get(ranks) is not dist.group.WORLD:
        make_group(ranks, name)
        _ordered[ranks] = dist.group.WORLD
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=256)
def _descending(mesh: Mesh) -> frozenset[str]:
    """The axes along which some ranks do not ascend."""
    if isinstance(mesh.order, range):
        return frozenset()
    cosets = [(a, mesh.coset([a], c)) for c in mesh.indices(mesh.axes) for a in mesh.axes]
    return frozenset(axis for axis, ranks in cosets if list(ranks) != sorted(ranks))


def _check_groups(device_mesh: DeviceMesh, type: TensorType) -> None:
    """Refuses blocks along an axis where torch's groups have not the order of its coordinates."""
    for axis in _descending(type.mesh) if device_mesh.get_coordinate() is not None else ():
        i = type.mesh.axis(axis)
        cut = not isinstance(type.layout.placements[i], (Replicate, Partial))
        if cut and not device_mesh.get_group(i).group_name.startswith(_ORDERED):
            raise LayoutError(
                f"torch does not say which rank along mesh axis {axis!r} holds which block: the "
                "coordinates of this DeviceMesh and its process groups have different orders.",
                type=type,
                mesh=type.mesh,
                hint="Let ranks ascend along the axis, or make the DeviceMesh with "
                "fdtensor.interop.to_device_mesh(mesh), whose groups follow its coordinates.",
            )


def _check_match(device_mesh: DeviceMesh, mesh: Mesh) -> None:
    given = Mesh.from_device_mesh(device_mesh)
    named = device_mesh.mesh_dim_names is None or given.axes == mesh.axes
    if given.sizes != mesh.sizes or given.ranks != mesh.ranks or not named:
        raise MeshError(
            "this DeviceMesh is not the mesh of the tensor.",
            given=given,
            tensor=mesh,
            hint="Redistribute the tensor to the other mesh first, or leave device_mesh out.",
        )


def _remember(mesh: Mesh, device_mesh: DeviceMesh) -> None:
    key, world = (mesh, device_mesh.device_type), dist.group.WORLD
    if not _descending(mesh) and _device_meshes.get(key, (None,))[0] is not world:
        _device_meshes[key] = (world, device_mesh)


def _comm(mesh: Mesh, device: torch.device) -> FuncolComm:
    """The FuncolComm that all tensors of this mesh share."""
    found = _comms.get((mesh, device))
    if found is None or found.world is not dist.group.WORLD:
        found = _comms[mesh, device] = FuncolComm(mesh, device)
    return found


def _refuse_simulated(comm: Comm[Any]) -> None:
    if not isinstance(comm, FuncolComm):
        raise CommError(
            "a torch DTensor has the local tensor of one rank, but a value of this Comm has those "
            "of all.",
            comm=comm,
            hint="Use a FuncolComm: connect(mesh) where a process group is up.",
        )
