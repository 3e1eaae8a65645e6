"""The DeviceMesh of a mesh, and whether its process groups have the order of its coordinates."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fdtensor.layouts.errors import LayoutError, MeshError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Replicate
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import NO_GROUPS, c10d_group
from fdtensor.runtime.control.process import groups, plane_of
from fdtensor.runtime.funcol import FuncolComm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["check_groups", "check_match", "comm_of", "remember", "to_device_mesh"]

_ORDERED = "fdtensor_ordered"
"""How the names of groups begin that are in the order of coordinates where ranks do not ascend."""

_device_meshes: dict[tuple[Mesh, str], tuple[Any, DeviceMesh]] = {}
_comms: dict[tuple[Mesh, torch.device], FuncolComm] = {}


def to_device_mesh(mesh: Mesh, device_type: str = "cpu") -> DeviceMesh:
    """The torch DeviceMesh with these axes and ranks: always the same one for a mesh.

    That is the one that a torch DTensor brought, or else one on the groups of `FuncolComm`, made
    by the ranks of the mesh alone. Along axes where ranks do not ascend its groups have the order
    of the coordinates, which those that DeviceMesh makes have not.
    """
    from torch.distributed.device_mesh import DeviceMesh

    known = _device_meshes.get((mesh, device_type))
    if known is not None and known[0] is dist.group.WORLD:
        return known[1]
    if not mesh.ndim:
        raise MeshError(
            "torch has no mesh without axes.", hint="Use a mesh of one axis of one rank."
        )
    ranks = torch.tensor(mesh.ranks, dtype=torch.int).view(mesh.sizes)
    coord = mesh.coord(dist.get_rank())
    if coord is None:
        device_mesh = DeviceMesh(device_type, ranks, mesh_dim_names=mesh.axes, **NO_GROUPS)
    else:
        along = [_group(mesh, axis, mesh.coset([axis], coord)) for axis in mesh.axes]
        device_mesh = DeviceMesh.from_group(along, device_type, ranks, mesh_dim_names=mesh.axes)
    _device_meshes[mesh, device_type] = (dist.group.WORLD, device_mesh)
    return device_mesh


def _group(mesh: Mesh, axis: str, ranks: tuple[int, ...]) -> Any:
    """The process group of these ranks along an axis, in the order of coordinates."""
    name = f"{_ORDERED}_{sha256(repr(ranks).encode()).hexdigest()[:16]}"
    if len(ranks) > 1 and axis not in _descending(mesh):
        (name,) = groups(mesh, axis)
    else:
        plane_of().groups.named(ranks, name)
    return c10d_group(name)


@remembered(256)
def _descending(mesh: Mesh) -> frozenset[str]:
    """The axes along which some ranks do not ascend."""
    if isinstance(mesh.order, range):
        return frozenset()
    cosets = [(a, mesh.coset([a], c)) for c in mesh.indices(mesh.axes) for a in mesh.axes]
    return frozenset(axis for axis, ranks in cosets if list(ranks) != sorted(ranks))


def check_groups(device_mesh: DeviceMesh, type: TensorType) -> None:
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


def check_match(device_mesh: DeviceMesh, mesh: Mesh) -> None:
    other = Mesh.from_device_mesh(device_mesh)
    named = device_mesh.mesh_dim_names is None or other.axes == mesh.axes
    if other.sizes != mesh.sizes or other.ranks != mesh.ranks or not named:
        raise MeshError(
            "this DeviceMesh is not the mesh of the tensor.",
            given=other,
            tensor=mesh,
            hint="Redistribute the tensor to the other mesh first, or leave device_mesh out.",
        )


def remember(mesh: Mesh, device_mesh: DeviceMesh) -> None:
    key, world = (mesh, device_mesh.device_type), dist.group.WORLD
    if not _descending(mesh) and _device_meshes.get(key, (None,))[0] is not world:
        _device_meshes[key] = (world, device_mesh)


def comm_of(mesh: Mesh, device: torch.device) -> FuncolComm:
    """The FuncolComm that all tensors of this mesh share."""
    comm = _comms.get((mesh, device))
    if comm is None or comm.world is not dist.group.WORLD:
        comm = _comms[mesh, device] = FuncolComm(mesh, device)
    return comm
