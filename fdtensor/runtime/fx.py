"""`to_fx`: what one rank runs for a program, as a plain torch.fx module."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.torch_private import schema_of
from fdtensor.ops.graph import Var
from fdtensor.ops.value_checks import CHECK
from fdtensor.programs.loops import has_loops
from fdtensor.programs.program import Program
from fdtensor.runtime.lines import Line, constant, of_ops
from fdtensor.runtime.local_program import Spelling, local_program

__all__ = ["is_whole", "places", "to_fx"]

aten = torch.ops.aten


def to_fx(
    program: Program, rank: int, *, backend: str = "gloo", device: str = "cpu"
) -> torch.fx.GraphModule:
    """A module of local ops and functional collectives, without anything of this library.

    It takes the blocks of `rank` in the order of `program.inputs` and returns a tuple of the blocks
    of the outputs; closed-over tensors become buffers. It runs by itself where the process groups
    that it names are there: `groups(mesh)` makes them. Its results have no derivatives, which would
    be those of one rank: take them in the function that is traced. Raises `TraceError` for a rank
    outside.
    """
    if program.mesh.position(rank) is None:
        raise TraceError(
            f"rank {rank} runs nothing of {program.name}: it is not in the mesh.",
            mesh=program.mesh,
            hint="Ask for a rank of the mesh.",
        )
    if has_loops(program.eqns):
        raise TraceError(
            f"{program.name} has a loop, and a graph has no lines that run again.",
            hint="Run it by spmd or run; or write its steps one after the other.",
        )
    local = local_program(program, rank, Spelling(backend, device, exchanges=True))
    module = torch.nn.Module()
    graph = torch.fx.Graph()
    nodes: dict[Var, torch.fx.Node] = {}
    count = len(program.inputs)
    for i, v in enumerate(local.inputs[:count]):
        nodes[v] = graph.placeholder(f"input_{i}")
    for i, (v, (_, tensor)) in enumerate(zip(local.inputs[count:], program.constants, strict=True)):
        nodes[v] = _buffer(module, graph, f"constant_{i}", tensor)
    for line in local.lines:
        _add(line, module, graph, nodes)
    outs = [nodes[v] for v in local.outs]
    if not is_whole(program):
        outs = [graph.call_function(aten.detach.default, (node,)) for node in outs]
    graph.output(tuple(outs))
    made = torch.fx.GraphModule(module, graph, class_name=program.name.replace(".", "_"))
    graph.lint()
    return made


def is_whole(program: Program) -> bool:
    """Whether all ranks have all of every value: only then are derivatives of one those of all."""
    return all(isinstance(p, Replicate) for t in program.types for p in t.layout.placements)


def _buffer(
    module: torch.nn.Module, graph: torch.fx.Graph, name: str, tensor: torch.Tensor
) -> torch.fx.Node:
    module.register_buffer(name, tensor.detach(), persistent=False)
    return graph.get_attr(name)


def _add(
    line: Line, module: torch.nn.Module, graph: torch.fx.Graph, nodes: dict[Var, torch.fx.Node]
) -> None:
    if line.op is CHECK:
        counts, faults = line.args
        none = graph.call_function(aten.eq.Scalar, (nodes[counts], 0))
        text = f"one of these does not hold: {'; '.join(faults)}"
        graph.call_function(
            aten._assert_async.msg, (graph.call_function(aten.all.default, (none,)), text)
        )
        return
    (first, *_) = line.outs
    if line.op is constant:
        assert first is not None
        nodes[first] = _buffer(module, graph, f"number_{len(nodes)}", line.args[0])
        return

    def given(value: Any) -> Any:
        if isinstance(value, Var):
            return nodes[value]
        return [given(v) for v in value] if isinstance(value, tuple) else value

    line = of_ops(line)
    kwargs = {name: given(value) for name, value in line.kwargs}
    made = graph.call_function(line.op, tuple(map(given, line.args)), kwargs)
    returns = schema_of(line.op).returns
    if len(returns) == 1 and str(returns[0].type) == "Tensor":
        assert first is not None
        nodes[first] = made
        return
    for place, v in zip(places(line), line.outs, strict=True):
        if v is not None:
            nodes[v] = graph.call_function(operator.getitem, (made, place))


def places(line: Line) -> list[int]:
    """Where the tensors are among what an op returns, numbers and what a mask leaves out apart."""
    returns = schema_of(line.op).returns
    if len(returns) == 1:
        return list(range(len(line.outs)))
    tensors = [i for i, r in enumerate(returns) if str(r.type) == "Tensor"]
    masks = [a for a in line.args if isinstance(a, tuple) and a and isinstance(a[0], bool)]
    if len(line.outs) < len(tensors) and masks:
        tensors = [i for i, wanted in zip(tensors, masks[-1], strict=True) if wanted]
    return tensors
