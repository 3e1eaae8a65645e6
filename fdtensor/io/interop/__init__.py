"""The doors to `torch.distributed.tensor`, which is imported when they are first used.

incoming has `from_torch` and outgoing `to_torch`: DTensors, alone or in pytrees, without a copy;
tensors takes one of them through, with its gradients. layouts says what placements mean and how
layouts are written, device_meshes which DeviceMesh a mesh is.
"""

from fdtensor.io.interop.device_meshes import to_device_mesh
from fdtensor.io.interop.incoming import from_torch
from fdtensor.io.interop.layouts import layout_from_torch, layout_to_torch
from fdtensor.io.interop.outgoing import to_torch

__all__ = ["from_torch", "layout_from_torch", "layout_to_torch", "to_device_mesh", "to_torch"]
