"""fdtensor: distributed tensors as plain values.

A layout is an immutable record. Moving a tensor from one layout to another is a pure function that
returns a plan: a list of collectives with their bytes. `run` reads a plan on a real mesh of
processes or on a simulated one, all ranks in this process. No tensor subclass anywhere.

    mesh = Mesh(dp=2, tp=4)
    src = TensorType((8, 16), torch.float32, mesh.layout("dp", None, partial={"tp": "sum"}))
    print(plan(src, mesh.layout(None, "tp")))

Where tensors lie:

    Mesh                            ranks on named axes
    Replicate, Shard, StridedShard, Ragged, Partial
                                    placements: what one axis does to a tensor
    Layout, TensorType              a placement for each axis; with a shape and a dtype

From one layout to another:

    plan, Plan                      the steps that receive the fewest bytes
    explain, show                   why a plan or program is what it is, and a picture of it

Tensors and what they run on:

    connect                         the real mesh where there is one, else the simulated one
    FuncolComm, SimulatedComm, Comm
                                    this rank's place on real processes; all ranks in this one
    local_cluster                   real ranks on this machine, for a notebook
    run                             a plan or program on a Comm
    distribute, from_local, shards  tensors into layouts
    DTensor                         a local tensor, its type and its Comm
    redistribute                    DTensors, or pytrees of them, to other layouts

Computing:

    call                            any function of DTensors, now
    spmd                            a plain torch function as one of pytrees of DTensors
    trace, Program                  the program that it becomes: read it, price it, run it
    bind                            a module with DTensors for its parameters
    like                            as out_layouts: those of an argument
    constrain, region               layouts of a value inside, or of all in a part of it
    saved_as                        the layout that a value has until the backward
    debug                           each line of a run compared with what its program says
    shard_map                       a function of local tensors that communicates by itself
    rule                            which layouts an op allows
    initialize                      parameters in shards, drawn from a key
    gradients                       those of a pytree of DTensors, after a backward

Namespaces:

    collectives                     psum, all_gather and their like, for functions of shard_map
    plans                           the collectives that plans consist of; several plans as one
    func                            grad, vjp, vmap, ... around functions of DTensors; scan
    cost                            the seconds of plans and programs, assumed or measured
    random                          numbers by key and place
    optim                           torch's optimizers on DTensors; norms and scales of gradients
    parallel                        layouts by the names of modules; pipelines; exported programs
    io                              checkpoints, safetensors, torch's own DTensors
    cluster                         real ranks on this machine
    errors                          each one sentence, the facts and what to do
    testing                         property tests of your own functions and rules

Every name of the namespaces but those of `random`, `optim` and `testing` can be had from `fdtensor`
itself too, and so can `Eqn`, a line of a program, `Placement`, the union of all placements, and
`fail_together`, a block of code whose errors are those of all ranks.
"""

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING

_collecting = gc.isenabled()
gc.disable()  # collections on the way would walk all that torch has
try:
    from fdtensor.layouts.layout import Layout
    from fdtensor.layouts.mesh import Mesh
    from fdtensor.layouts.placement import Partial, Ragged, Replicate, Shard, StridedShard
    from fdtensor.layouts.placement import Placement as Placement
    from fdtensor.layouts.tensor_type import TensorType
    from fdtensor.ops.line_checks import debug
    from fdtensor.ops.pins import constrain
    from fdtensor.ops.region import region
    from fdtensor.ops.rules import rule
    from fdtensor.ops.saved_as import saved_as
    from fdtensor.plans.planner import Plan, plan
    from fdtensor.programs.options import like
    from fdtensor.programs.program import Eqn as Eqn
    from fdtensor.programs.program import Program
    from fdtensor.programs.tracer import trace
    from fdtensor.runtime.comm import Comm
    from fdtensor.runtime.interpreter import run
    from fdtensor.runtime.interpreter import run_fused as run_fused
    from fdtensor.runtime.simulator import SimulatedComm
    from fdtensor.tensors.bind import bind
    from fdtensor.tensors.call import call
    from fdtensor.tensors.connect import connect, distribute, from_local, redistribute, shards
    from fdtensor.tensors.dtensor import DTensor
    from fdtensor.tensors.grad_norms import gradients
    from fdtensor.tensors.initialize import initialize
    from fdtensor.tensors.spmd import spmd

    import_module("fdtensor.inspect")  # it has what plans, programs and tensors show of themselves
finally:
    if not gc.get_freeze_count():
        gc.freeze()  # what was imported joins the oldest objects without a walk through it
        gc.unfreeze()
    if _collecting:
        gc.enable()

if TYPE_CHECKING:
    from fdtensor import cluster as cluster
    from fdtensor import collectives as collectives
    from fdtensor import cost as cost
    from fdtensor import errors as errors
    from fdtensor import func as func
    from fdtensor import io as io
    from fdtensor import optim as optim
    from fdtensor import parallel as parallel
    from fdtensor import plans as plans
    from fdtensor import random as random
    from fdtensor import testing as testing
    from fdtensor.cluster import *
    from fdtensor.cluster import local_cluster
    from fdtensor.collectives import *
    from fdtensor.cost import *
    from fdtensor.errors import *
    from fdtensor.func import *
    from fdtensor.inspect.explanation import explain
    from fdtensor.inspect.pictures import show
    from fdtensor.io import *
    from fdtensor.parallel import *
    from fdtensor.plans import *
    from fdtensor.runtime.funcol import FuncolComm
    from fdtensor.tensors import fail_together as failing
    from fdtensor.tensors import grad_norms, scaling
    from fdtensor.tensors.fail_together import *
    from fdtensor.tensors.grad_norms import *
    from fdtensor.tensors.scaling import *
    from fdtensor.tensors.shard_map.mapped import shard_map
    from fdtensor.testing import discovery
    from fdtensor.testing.discovery import *
    from fdtensor.testing.row_checks import verify as verify

__version__ = "0.1.0"

__all__ = [
    "Comm",
    "DTensor",
    "FuncolComm",
    "Layout",
    "Mesh",
    "Partial",
    "Plan",
    "Program",
    "Ragged",
    "Replicate",
    "Shard",
    "SimulatedComm",
    "StridedShard",
    "TensorType",
    "bind",
    "call",
    "connect",
    "constrain",
    "debug",
    "distribute",
    "explain",
    "from_local",
    "gradients",
    "initialize",
    "like",
    "local_cluster",
    "plan",
    "redistribute",
    "region",
    "rule",
    "run",
    "saved_as",
    "shard_map",
    "shards",
    "show",
    "spmd",
    "trace",
]
"""The names of a wildcard import: no namespace, for `io` and `random` would hide Python's own."""

if TYPE_CHECKING:  # checkers take what a wildcard imports for private, unless it is named here
    __all__ += cluster.__all__
    __all__ += collectives.__all__
    __all__ += cost.__all__
    __all__ += errors.__all__
    __all__ += func.__all__
    __all__ += io.__all__
    __all__ += parallel.__all__
    __all__ += plans.__all__
    __all__ += failing.__all__
    __all__ += grad_norms.__all__
    __all__ += scaling.__all__
    __all__ += discovery.__all__

_NAMESPACES = (
    "cluster",
    "collectives",
    "cost",
    "errors",
    "func",
    "io",
    "optim",
    "parallel",
    "plans",
    "random",
    "testing",
)

_FIRST_SIGHT = {
    "FuncolComm": "runtime.funcol",
    "explain": "inspect.explanation",
    "local_cluster": "cluster",
    "shard_map": "tensors.shard_map.mapped",
    "show": "inspect.pictures",
}
"""The names of `__all__` that import torch.distributed, or much that few scripts need."""

_ALSO = (
    "cluster",
    "collectives",
    "cost",
    "errors",
    "func",
    "io",
    "parallel",
    "plans",
    "tensors.fail_together",
    "tensors.grad_norms",
    "tensors.scaling",
    "testing.discovery",
    "testing.row_checks",
)
"""The modules whose public names can be had from here too."""


if not TYPE_CHECKING:  # checkers would take any name for one of fdtensor

    def __getattr__(name: str) -> object:
        if name in _NAMESPACES:
            return import_module(f"fdtensor.{name}")
        for home in (_FIRST_SIGHT[name],) if name in _FIRST_SIGHT else _ALSO:
            module = import_module(f"fdtensor.{home}")
            if name in module.__all__:
                value = getattr(module, name)
                setattr(sys.modules[__name__], name, value)
                return value
        own = sys.modules[__name__]  # Python says which of its names was meant, perhaps
        raise AttributeError(f"module 'fdtensor' has no attribute {name!r}", name=name, obj=own)


def __dir__() -> list[str]:
    return sorted([*__all__, *_NAMESPACES, "__version__"])
