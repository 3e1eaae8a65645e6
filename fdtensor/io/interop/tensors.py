"""One tensor through the door: its local tensor as it is, and gradients in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fdtensor.io.interop.device_meshes import check_groups, check_match, to_device_mesh
from fdtensor.io.interop.layouts import layout_to_torch, same_blocks, types_of
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import dtensor_spec_module, local_tensor_of, strided_shard
from fdtensor.plans.planner import plan
from fdtensor.runtime.comm import Comm
from fdtensor.runtime.interpreter import run

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor as TorchDTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

__all__ = ["arrived", "handed", "local_of"]


def arrived(dtensor: TorchDTensor) -> torch.Tensor:
    """The local tensor of a torch DTensor itself, once it is there."""
    local: Any = local_tensor_of(dtensor)
    wait = getattr(local, "wait", None)  # a collective under way is a tensor with this method
    return local if wait is None else wait()


def local_of(dtensor: TorchDTensor, type: TensorType, comm: Comm[Any]) -> torch.Tensor:
    """The local tensor, connected to the torch DTensor where that takes part in autograd."""
    if torch.is_grad_enabled() and dtensor.requires_grad:
        return _FromTorch.apply(dtensor, type, comm)  # type: ignore[return-value]
    return arrived(dtensor).detach()


def handed(
    local: torch.Tensor, type: TensorType, comm: Comm[Any], device_mesh: DeviceMesh | None = None
) -> TorchDTensor:
    """The torch DTensor with this local tensor, connected to it where it takes part in autograd."""
    placements, by_order = layout_to_torch(type)
    if device_mesh is None:
        device_mesh = to_device_mesh(type.mesh, local.device.type)
    else:
        check_match(device_mesh, type.mesh)
        check_groups(device_mesh, type)
    if device_mesh.get_coordinate() is None:
        local = local.new_empty(0)  # what torch has on a rank outside
    spec = _spec(device_mesh, placements, by_order, type.shape, local)
    if torch.is_grad_enabled() and local.requires_grad:
        return _ToTorch.apply(local, spec, type, comm)  # type: ignore[return-value]
    return _wrapped(local.detach(), spec, False)


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
    specs = dtensor_spec_module()
    meta = specs.TensorMeta(torch.Size(shape), _full_stride(local, shape), local.dtype)
    strided = any(isinstance(p, strided_shard()) for p in placements)
    options: Any = {"use_strided_shard_as_shard_order": False} if strided and not by_order else {}
    return specs.DTensorSpec(device_mesh, tuple(placements), tensor_meta=meta, **options)


def _full_stride(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense full tensor whose dims lie in memory as those of the local one."""
    dims = range(len(shape))
    nested = sorted(dims, key=lambda d: (local.stride(d), -d)) if local.dim() == len(shape) else ()
    strides, step = [0] * len(shape), 1
    for d in nested or reversed(dims):
        strides[d] = step
        step *= max(1, shape[d])
    return tuple(strides)


class _FromTorch(torch.autograd.Function):
    """The local tensor of a torch DTensor of a type; cotangents go back as its cotangent type."""

    @staticmethod
    def forward(ctx: Any, dtensor: Any, type: TensorType, comm: Any) -> torch.Tensor:
        ctx.device_mesh, ctx.type, ctx.comm = dtensor.device_mesh, type, comm
        ctx.set_materialize_grads(False)
        local = arrived(dtensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, None, None
        return handed(grads[0], ctx.type.cotangent(), ctx.comm, ctx.device_mesh), None, None


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
        type = types_of(grads[0], wanted.mesh)[0]
        local = local_of(grads[0], type, comm)
        if type.layout.partial or not same_blocks(type, wanted):
            local = run(plan(type, wanted, cost=comm.cost), local, comm)
        return local, None, None, None
