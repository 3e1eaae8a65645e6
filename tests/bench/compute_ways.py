"""`WAYS`: a training step of a model as one rank of a pretended world of 4, tensor parallel.

Every way gives the gradients of all parameters and of the input, and runs on its own copies of
them; their numbers are drawn anew.

    local         plain torch on the blocks of one rank, no collectives
    eager         the same with the collectives of Megatron, by autograd
    make_fx       `eager` traced by torch into one graph of aten ops, run as Python
    program       the code that fdtensor runs for its program, called directly
    to_fx         the module that `program.to_fx(rank)` gives
    spmd grad     `spmd(torch.func.grad_and_value(loss))` on DTensors
    spmd          `spmd(loss)` on DTensors, then autograd
    parallelize   a module by torch's `parallelize_module`
    dtensor       torch DTensors everywhere

and with `compiled` before it what `torch.compile` makes of a way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.cost import NCCL
from fdtensor.programs.program import Program
from fdtensor.runtime.control.process import groups
from fdtensor.runtime.funcol import FuncolComm
from fdtensor.runtime.runner import compiled
from fdtensor.tensors.connect import from_local
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.spmd import spmd
from tests.bench.models import Model, Module
from tests.bench.traffic import as_torch, device_mesh

__all__ = ["COMPILED", "WAYS", "Step", "Way"]

MESH = Mesh(tp=4)

Step = Callable[[], Any]
"""Runs one step, and returns its gradients and perhaps the loss."""

Way = Callable[[Model], Step]


# --- by hand ---------------------------------------------------------------------------------


def _blocks(model: Model) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What this rank holds: the parameters and the input, as leaves of autograd."""
    params = {n: torch.randn(model.local_shape(n, MESH.size)) / 8 for n in model.shapes}
    return {n: p.requires_grad_() for n, p in params.items()}, torch.randn(model.x).requires_grad_()


class _Enter(torch.autograd.Function):
    """Megatron's f: nothing, and an all_reduce in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _all_reduced(ct)


class _Leave(torch.autograd.Function):
    """Megatron's g: an all_reduce, and nothing in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _all_reduced(x)

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return ct


def _all_reduced(x: torch.Tensor) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor.default(ops.all_reduce.default(x.contiguous(), "sum", _group()))


def _group() -> str:
    [name] = groups(MESH, "tp")
    return name


def _local(model: Model, *hooks: Any) -> Step:
    params, x = _blocks(model)
    leaves = [*params.values(), x]
    return lambda: torch.autograd.grad(model.loss(params, x, *hooks), leaves)


def _eager(model: Model) -> Step:
    return _local(model, _Enter.apply, _Leave.apply)


def _graph(model: Model) -> tuple[Any, list[torch.Tensor]]:
    """The graph of a step with collectives, and what it takes."""
    params, x = _blocks(model)
    names, given = list(params), [*params.values(), x]

    def step(*tensors: torch.Tensor) -> Any:
        leaves = [t.detach().requires_grad_() for t in tensors]
        loss = model.loss(dict(zip(names, leaves)), leaves[-1], _Enter.apply, _Leave.apply)
        return loss, *torch.autograd.grad(loss, leaves)

    tensors = [t.detach() for t in given]
    return make_fx(step)(*tensors), tensors


def _make_fx(model: Model) -> Step:
    graph, tensors = _graph(model)
    return _bare(graph, tensors)


def _bare(code: Callable[..., Any], given: list[torch.Tensor]) -> Step:
    """Code called below autograd."""

    def step() -> Any:
        with torch._C._AutoDispatchBelowAutograd():  # type: ignore[attr-defined]
            return code(*given)

    return step


# --- fdtensor --------------------------------------------------------------------------------


def _ours(model: Model, smooth: bool) -> tuple[dict[str, DTensor[Any]], DTensor[Any]]:
    """The parameters and the input as DTensors."""
    comm = FuncolComm(MESH, cost=NCCL)
    params, x = _blocks(model)

    def made(block: torch.Tensor, shape: tuple[int, ...], dim: int | None) -> DTensor[Any]:
        layout = MESH.layout(*["tp" if d == dim else None for d in range(len(shape))])
        found = from_local(block.detach(), TensorType(shape, block.dtype, layout), comm)
        return found.requires_grad_(smooth)

    ours = {n: made(p, model.shapes[n], model.sharded.get(n)) for n, p in params.items()}
    return ours, made(x, model.x, None)


def _gradient(model: Model) -> Any:
    def loss(params: Any, x: Any) -> torch.Tensor:
        return model.loss(params, x)

    return spmd(torch.func.grad_and_value(loss, argnums=(0, 1)))


def _spmd_grad(model: Model) -> Step:
    (params, x), step = _ours(model, False), _gradient(model)
    return lambda: step(params, x)


def _spmd(model: Model) -> Step:
    def loss(params: Any, x: Any) -> torch.Tensor:
        return model.loss(params, x)

    (params, x), forward = _ours(model, True), spmd(loss)
    leaves = [d.local for d in (*params.values(), x)]
    return lambda: torch.autograd.grad(forward(params, x).local, leaves)


def _traced(model: Model) -> tuple[Program, list[torch.Tensor], FuncolComm]:
    """The program of the step, the blocks that it takes, constants too, and its Comm."""
    params, x = _ours(model, False)
    comm: Any = x.comm
    program = _gradient(model).trace(params, x)
    ours = [params[name].local for name in sorted(params)]  # as pytrees have them
    return program, [*ours, x.local, *(t for _, t in program.constants)], comm


def _program(model: Model) -> Step:
    program, given, comm = _traced(model)
    return _bare(compiled(program, comm), given)


def _to_fx(model: Model) -> Step:
    program, given, comm = _traced(model)
    return _bare(program.to_fx(comm.rank), given[: len(program.inputs)])


# --- torch DTensor ---------------------------------------------------------------------------


def _parallelized(model: Model) -> tuple[Any, list[torch.Tensor]]:
    module = Module(model)
    parallelize_module(module, device_mesh(MESH), module.styles())
    x = torch.randn(model.x).requires_grad_()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return module(x).square().mean()

    return loss, [x, *module.parameters()]


def _parallelize(model: Model) -> Step:
    loss, leaves = _parallelized(model)
    return lambda: torch.autograd.grad(loss(leaves[0]), leaves)


def _everywhere(model: Model) -> tuple[Any, list[TorchDTensor]]:
    ours, x = _ours(model, False)
    mesh = device_mesh(MESH)

    def made(d: DTensor[Any]) -> TorchDTensor:
        placements = as_torch(d.layout)
        found: Any = TorchDTensor.from_local(d.local, mesh, placements, run_check=False)
        return found.detach().requires_grad_()

    theirs = {n: made(d) for n, d in ours.items()}
    return theirs, [made(x), *theirs.values()]


def _dtensor(model: Model) -> Step:
    params, leaves = _everywhere(model)
    return lambda: torch.autograd.grad(model.loss(params, leaves[0]), leaves)


# --- compiled --------------------------------------------------------------------------------


def _compiled(code: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(code, fullgraph=True, dynamic=False)


def _compiled_make_fx(model: Model) -> Step:
    graph, tensors = _graph(model)
    return _undifferentiated(_compiled(graph), tensors)


def _compiled_to_fx(model: Model) -> Step:
    program, given, comm = _traced(model)
    return _undifferentiated(_compiled(program.to_fx(comm.rank)), given[: len(program.inputs)])


def _undifferentiated(code: Callable[..., Any], given: list[torch.Tensor]) -> Step:
    def step() -> Any:
        with torch.no_grad():
            return code(*given)

    return step


def _compiled_parallelize(model: Model) -> Step:
    loss, leaves = _parallelized(model)
    code = _compiled(loss)
    return lambda: torch.autograd.grad(code(leaves[0]), leaves)


def _compiled_dtensor(model: Model) -> Step:
    params, leaves = _everywhere(model)
    code = _compiled(lambda x: model.loss(params, x))
    return lambda: torch.autograd.grad(code(leaves[0]), leaves)


WAYS: dict[str, Way] = {
    "local": _local,
    "eager": _eager,
    "make_fx": _make_fx,
    "program": _program,
    "to_fx": _to_fx,
    "spmd grad": _spmd_grad,
    "spmd": _spmd,
    "parallelize": _parallelize,
    "dtensor": _dtensor,
}
"""From a model to its step."""

COMPILED: dict[str, Way] = {
    "compiled make_fx": _compiled_make_fx,
    "compiled to_fx": _compiled_to_fx,
    "compiled parallelize": _compiled_parallelize,
    "compiled dtensor": _compiled_dtensor,
}
"""Ways that take seconds to start."""
