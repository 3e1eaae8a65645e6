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
from fdtensor.discovery import Discovered, discover
from fdtensor.dtensor import DTensor
from fdtensor.errors import (
    CheckpointError,
    CommError,
    DataDependentError,
    FdtensorError,
    LayoutError,
    MeshError,
    PlanError,
    RuleError,
    TraceError,
    ValueTreeError,
)
from fdtensor.explanation import explain
from fdtensor.fused import Fused, fuse
from fdtensor.gradients import (
    clip_grad_norm,
    clip_grad_norm_,
    found_inf,
    gradients,
    local_tensors,
    total_norm,
)
from fdtensor.initialize import initialize
from fdtensor.interpreter import run, run_fused
from fdtensor.layout import Layout, TensorType
from fdtensor.mesh import Mesh
from fdtensor.named import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    reduce_scatter,
)
from fdtensor.placement import (
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    StridedShard,
)
from fdtensor.planner import Plan, plan
from fdtensor.program import Eqn, Program
from fdtensor.recorder import constrain
from fdtensor.rules import rule
from fdtensor.saved import saved_as
from fdtensor.scaling import GradScaler, LossScale
from fdtensor.shard_map import shard_map
from fdtensor.simulator import SimulatedComm
from fdtensor.spmd import call, spmd
from fdtensor.tracer import trace
from fdtensor.transforms.input_reshard import input_reshard, remove_input_reshard
from fdtensor.transforms.styles import (
    Colwise,
    Rowwise,
    SequenceParallel,
    VocabParallel,
    layouts_for,
)
from fdtensor.transition import transition
from fdtensor.verify import verify

if TYPE_CHECKING:
    from fdtensor import random
    from fdtensor.checkpoint import checkpoint_contents, load_checkpoint, save_checkpoint
    from fdtensor.cluster import LocalCluster, WorkerError, local_cluster
    from fdtensor.funcol import FuncolComm
    from fdtensor.interop import from_torch, to_torch
    from fdtensor.process_groups import groups
    from fdtensor.safetensors import load_safetensors, save_safetensors
    from fdtensor.transforms.tensor_parallel import tensor_parallel

_LAZY = {
    "FuncolComm": "funcol",
    "LocalCluster": "cluster",
    "WorkerError": "cluster",
    "local_cluster": "cluster",
    "groups": "process_groups",
    "tensor_parallel": "transforms.tensor_parallel",
    "from_torch": "interop",
    "to_torch": "interop",
    "checkpoint_contents": "checkpoint",
    "load_checkpoint": "checkpoint",
    "save_checkpoint": "checkpoint",
    "load_safetensors": "safetensors",
    "save_safetensors": "safetensors",
}


def __getattr__(name: str) -> object:
    """What takes long to import, or torch.distributed, imported when first asked for."""
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(f"fdtensor.{_LAZY[name]}"), name)
    if name == "random":  # not in __all__: a wildcard would hide Python's own
        return importlib.import_module("fdtensor.random")
    raise AttributeError(f"module 'fdtensor' has no attribute {name!r}")


__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "CheckpointError",
    "Collective",
    "Colwise",
    "Comm",
    "CommError",
    "CostModel",
    "DTensor",
    "DataDependentError",
    "Discovered",
    "Eqn",
    "Exchange",
    "FdtensorError",
    "FuncolComm",
    "Fused",
    "GLOO",
    "GradScaler",
    "Layout",
    "LayoutError",
    "LocalCluster",
    "LossScale",
    "Mask",
    "Mesh",
    "MeshError",
    "NCCL",
    "Pad",
    "Partial",
    "Placement",
    "Plan",
    "PlanError",
    "Program",
    "Ragged",
    "ReduceScatter",
    "Replicate",
    "Rowwise",
    "RuleError",
    "Scale",
    "SequenceParallel",
    "Shard",
    "SimulatedComm",
    "Slice",
    "Step",
    "StridedShard",
    "TensorType",
    "TraceError",
    "ValueTreeError",
    "VocabParallel",
    "WorkerError",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "calibrate",
    "call",
    "checkpoint_contents",
    "clip_grad_norm",
    "clip_grad_norm_",
    "connect",
    "constrain",
    "discover",
    "distribute",
    "estimate",
    "explain",
    "found_inf",
    "from_local",
    "from_torch",
    "fuse",
    "gradients",
    "groups",
    "initialize",
    "input_reshard",
    "layouts_for",
    "load_checkpoint",
    "load_safetensors",
    "local_cluster",
    "local_tensors",
    "plan",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "redistribute",
    "reduce_scatter",
    "remove_input_reshard",
    "rule",
    "run",
    "run_fused",
    "save_checkpoint",
    "save_safetensors",
    "saved_as",
    "shard_map",
    "shards",
    "spmd",
    "tensor_parallel",
    "to_torch",
    "total_norm",
    "trace",
    "transition",
    "verify",
]
