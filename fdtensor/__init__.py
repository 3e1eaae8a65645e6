"""fdtensor: distributed tensors as plain values.

A layout is an immutable record. Moving a tensor from one layout to another is a pure function that
returns a plan: a list of collectives with their bytes. `run` reads a plan on a real mesh of
processes or on a simulated one, all ranks in this process. No tensor subclass anywhere.

    mesh = Mesh(dp=2, tp=4)
    src = TensorType((8, 16), torch.float32, mesh.layout("dp", None, partial={"tp": "sum"}))
    print(plan(src, mesh.layout(None, "tp")))
"""

from typing import TYPE_CHECKING

from fdtensor.api import connect, distribute, from_local, redistribute, shards
from fdtensor.calibrate import calibrate, estimate
from fdtensor.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Exchange,
    Mask,
    Pad,
    ReduceScatter,
    Scale,
    Slice,
    Step,
)
from fdtensor.comm import Comm
from fdtensor.cost import GLOO, NCCL, CostModel
from fdtensor.dtensor import DTensor
from fdtensor.errors import (
    CommError,
    FdtensorError,
    LayoutError,
    MeshError,
    PlanError,
    ValueTreeError,
)
from fdtensor.fused import Fused, fuse
from fdtensor.interpreter import run, run_fused
from fdtensor.layout import Layout, TensorType
from fdtensor.mesh import Mesh
from fdtensor.placement import (
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    StridedShard,
)
from fdtensor.planner import Plan, plan
from fdtensor.simulator import SimulatedComm
from fdtensor.transition import transition

if TYPE_CHECKING:
    from fdtensor.funcol import FuncolComm
    from fdtensor.interop import from_torch, to_torch
    from fdtensor.process_groups import groups

_LAZY = {
    "FuncolComm": "funcol",
    "groups": "process_groups",
    "from_torch": "interop",
    "to_torch": "interop",
}


def __getattr__(name: str) -> object:
    """The names that need torch.distributed, imported when first asked for."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f"fdtensor.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'fdtensor' has no attribute {name!r}")


__all__ = [
    "GLOO",
    "NCCL",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Collective",
    "Comm",
    "CommError",
    "CostModel",
    "DTensor",
    "Exchange",
    "FdtensorError",
    "FuncolComm",
    "Fused",
    "Layout",
    "LayoutError",
    "Mask",
    "Mesh",
    "MeshError",
    "Pad",
    "Partial",
    "Placement",
    "Plan",
    "PlanError",
    "Ragged",
    "ReduceScatter",
    "Replicate",
    "Scale",
    "Shard",
    "SimulatedComm",
    "Slice",
    "Step",
    "StridedShard",
    "TensorType",
    "ValueTreeError",
    "calibrate",
    "connect",
    "distribute",
    "estimate",
    "from_local",
    "from_torch",
    "fuse",
    "groups",
    "plan",
    "redistribute",
    "run",
    "run_fused",
    "shards",
    "to_torch",
    "transition",
]
