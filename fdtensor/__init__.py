"""fdtensor: distributed tensors as plain values.

A layout is an immutable record. Moving a tensor from one layout to another is a pure function that
returns a plan: a list of collectives with their bytes. `run` reads a plan on a real mesh of
processes or on a simulated one, all ranks in this process. No tensor subclass anywhere.

    mesh = Mesh(dp=2, tp=4)
    src = TensorType((8, 16), torch.float32, mesh.layout("dp", None, partial={"tp": "sum"}))
    print(plan(src, mesh.layout(None, "tp")))

Where tensors lie:

    Mesh                            ranks on named axes
    Replicate, Shard, StridedShard, Ragged, Partial, Placement
                                    what one axis does to a tensor
    Layout, TensorType              a placement for each axis; with a shape and a dtype

From one layout to another:

    plan, Plan                      the steps that receive the fewest bytes
    transition                      the one step that an axis takes by itself
    explain, show                   why a plan is what it is, and a picture of it
    Step, Collective, AllGather, AllReduce, AllToAll, Broadcast, Exchange, ReduceScatter, Mask,
    Pad, Scale, Slice               what plans are made of
    fuse, Fused                     several plans whose traffic goes together
    CostModel, NCCL, GLOO, calibrate, estimate
                                    the seconds of it, assumed or measured

Tensors and what they run on:

    connect                         the real mesh where there is one, else the simulated one
    FuncolComm, SimulatedComm, Comm
                                    this rank's place on real processes; all ranks in this one
    run, run_fused                  a plan or program on a Comm
    distribute, from_local, shards  tensors into layouts
    DTensor                         a local tensor, its type and its Comm
    redistribute                    DTensors, or pytrees of them, to other layouts
    groups                          the process groups of a mesh
    local_cluster, LocalCluster, WorkerError
                                    real ranks on this machine, for a notebook

Computing:

    call                            any function of DTensors, now
    spmd                            a plain torch function as one of pytrees of DTensors
    trace, Program, Eqn             the program that it becomes: read it, price it, run it
    like                            as out_layouts: those of an argument
    constrain, saved_as             layouts of values inside, now and until the backward
    debug                           each line of a run compared with what its program says
    shard_map, psum, pmean, pmax, pmin, all_gather, reduce_scatter, all_to_all, ppermute,
    axis_index, axis_size           functions of local tensors that communicate by themselves
    rule, verify, discover, Discovered
                                    which layouts an op allows: written, proved, found

Models:

    initialize                      parameters in shards, drawn from a key
    layouts_for, Colwise, Rowwise, VocabParallel, SequenceParallel
                                    layouts by the names of modules
    tensor_parallel                 the exported program of one rank
    input_reshard, remove_input_reshard
                                    activations that wait in shards
    optim                           torch's optimizers on DTensors: `from fdtensor import optim`
    gradients, local_tensors, total_norm, clip_grad_norm, clip_grad_norm_, found_inf, GradScaler,
    LossScale                       around optimizers
    random                          numbers by key and place: `from fdtensor import random`

Files and torch's own tensors:

    save_checkpoint, load_checkpoint, checkpoint_contents
                                    through torch.distributed.checkpoint, on any mesh
    save_safetensors, load_safetensors
                                    each rank reads its blocks
    from_torch, to_torch            torch.distributed.tensor, there and back

Errors, each one sentence, the facts and what to do: FdtensorError, and of its kind LayoutError,
MeshError, PlanError, CommError, TraceError, DataDependentError, RuleError, ValueTreeError,
IndexRangeError, OperandError and CheckpointError. FallbackWarning is said of what runs on replicas.
Property tests of your own functions: `fdtensor.testing`.
"""

from typing import TYPE_CHECKING

from fdtensor.inspect.calibrate import calibrate, estimate
from fdtensor.inspect.explanation import explain
from fdtensor.layouts.errors import (
    CheckpointError,
    CommError,
    DataDependentError,
    FallbackWarning,
    FdtensorError,
    IndexRangeError,
    LayoutError,
    MeshError,
    OperandError,
    PlanError,
    RuleError,
    TraceError,
    ValueTreeError,
)
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import (
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    StridedShard,
)
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.line_checks import debug
from fdtensor.ops.pins import constrain
from fdtensor.ops.rules import rule
from fdtensor.ops.saved_as import saved_as
from fdtensor.parallel.input_reshard import input_reshard, remove_input_reshard
from fdtensor.parallel.styles import (
    Colwise,
    Rowwise,
    SequenceParallel,
    VocabParallel,
    layouts_for,
)
from fdtensor.plans.collective import (
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
from fdtensor.plans.cost import GLOO, NCCL, CostModel
from fdtensor.plans.fused import Fused, fuse
from fdtensor.plans.planner import Plan, plan
from fdtensor.plans.transitions import transition
from fdtensor.programs.options import like
from fdtensor.programs.program import Eqn, Program
from fdtensor.programs.tracer import trace
from fdtensor.runtime.comm import Comm
from fdtensor.runtime.interpreter import run, run_fused
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.call import call
from fdtensor.tensors.connect import connect, distribute, from_local, redistribute, shards
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.grad_norms import (
    clip_grad_norm,
    clip_grad_norm_,
    found_inf,
    gradients,
    local_tensors,
    total_norm,
)
from fdtensor.tensors.initialize import initialize
from fdtensor.tensors.scaling import GradScaler, LossScale
from fdtensor.tensors.shard_map.collectives import (
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
from fdtensor.tensors.shard_map.mapped import shard_map
from fdtensor.tensors.spmd import spmd
from fdtensor.testing.discovery import Discovered, discover
from fdtensor.testing.verify import verify

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fdtensor.cluster import LocalCluster, WorkerError, local_cluster
    from fdtensor.inspect.pictures import show
    from fdtensor.io.checkpoint import checkpoint_contents, load_checkpoint, save_checkpoint
    from fdtensor.io.interop import from_torch, to_torch
    from fdtensor.io.safetensors import load_safetensors, save_safetensors
    from fdtensor.parallel.tensor_parallel import tensor_parallel
    from fdtensor.runtime.funcol import FuncolComm
    from fdtensor.runtime.process_groups import groups
    from fdtensor.tensors import optim, random

_LAZY = {
    "FuncolComm": "runtime.funcol",
    "LocalCluster": "cluster",
    "WorkerError": "cluster",
    "local_cluster": "cluster",
    "groups": "runtime.process_groups",
    "tensor_parallel": "parallel.tensor_parallel",
    "from_torch": "io.interop",
    "to_torch": "io.interop",
    "checkpoint_contents": "io.checkpoint",
    "load_checkpoint": "io.checkpoint",
    "save_checkpoint": "io.checkpoint",
    "load_safetensors": "io.safetensors",
    "save_safetensors": "io.safetensors",
    "show": "inspect.pictures",
}


def __getattr__(name: str) -> object:
    """What takes long to import, or torch.distributed, imported when first asked for."""
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(f"fdtensor.{_LAZY[name]}"), name)
    if name in ("optim", "random"):  # not in __all__: a wildcard would hide Python's own random
        return importlib.import_module(f"fdtensor.tensors.{name}")
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
    "FallbackWarning",
    "FdtensorError",
    "FuncolComm",
    "Fused",
    "GLOO",
    "GradScaler",
    "IndexRangeError",
    "Layout",
    "LayoutError",
    "LocalCluster",
    "LossScale",
    "Mask",
    "Mesh",
    "MeshError",
    "NCCL",
    "OperandError",
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
    "debug",
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
    "like",
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
    "show",
    "spmd",
    "tensor_parallel",
    "to_torch",
    "total_norm",
    "trace",
    "transition",
    "verify",
]
