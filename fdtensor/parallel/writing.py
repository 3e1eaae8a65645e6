"""`written`: the exported program of one rank, from the lines that it runs and what they were."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import Any

import torch
import torch.fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.fx.node import map_arg

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import schema_of
from fdtensor.ops.graph import Var
from fdtensor.parallel.exported import Exported
from fdtensor.parallel.nodes import Nodes
from fdtensor.parallel.numbers import Numbers, unsettled
from fdtensor.parallel.opaque_calls import OPAQUE, stands_for
from fdtensor.parallel.rank_programs import RankPrograms
from fdtensor.parallel.state_blocks import state_blocks
from fdtensor.runtime.fx import is_whole, places
from fdtensor.runtime.lines import Line, constant, of_ops

__all__ = ["written"]

aten = torch.ops.aten


def written(
    exported: Exported, programs: RankPrograms, layouts: Mapping[str, Layout], rank: int
) -> ExportedProgram:
    """The exported program with the lines of `rank` and its blocks of the state."""
    writer = _Writer(exported, programs, layouts, rank)
    inputs, constants = writer.inputs()
    writer.lines()
    outputs = writer.outputs()
    writer.nodes.graph.lint()
    old = exported.program
    entries = [copy.copy(entry) for entry in old.module_call_graph]
    for entry in entries[1:]:
        entry.signature = None  # it would name nodes that are no more
    return ExportedProgram(
        torch.fx.GraphModule(writer.root, writer.nodes.graph),
        writer.nodes.graph,
        ExportGraphSignature(inputs, outputs),
        state_blocks(old.state_dict, layouts, rank),
        dict(old.range_constraints),
        entries,
        old.example_inputs,
        {**old.constants, **constants},
        verifiers=old.verifiers,
    )


class _Writer:
    """The program of a rank as it is written: inputs, lines, outputs."""

    def __init__(
        self, exported: Exported, programs: RankPrograms, layouts: Mapping[str, Layout], rank: int
    ) -> None:
        self.exported, self.programs, self.layouts, self.rank = exported, programs, layouts, rank
        self.program = programs.programs[0]
        self.nodes = Nodes(exported)
        self.numbers = Numbers(self.nodes, programs.sizes)
        self.root = torch.nn.Module()
        self.env: dict[Var, torch.fx.Node] = {}
        first, *others = programs.lines
        for other in others:
            if [line.op for line in other.lines] != [line.op for line in first.lines]:
                raise unsettled("the lines of this rank")

    def inputs(self) -> tuple[list[InputSpec], dict[str, torch.Tensor]]:
        """Adds the inputs, numbers of ours before those of the user; their specs and values."""
        specs: list[InputSpec] = []
        constants: dict[str, torch.Tensor] = {}
        program = self.programs.lines[0]
        numbers = {n: i for i, n in enumerate(self.exported.tensors)}
        ours = self._constants()

        def take() -> None:
            for line in ours:  # once: it is an iterator
                name = f"fdtensor_{len(constants)}"
                constants[name] = line.args[0]
                specs.append(self._constant(name, line))

        for old, spec in zip(
            self.exported.placeholders.values(),
            self.exported.program.graph_signature.input_specs,
            strict=True,
        ):
            if spec.kind == InputKind.USER_INPUT:
                take()
            node = self.nodes.graph.placeholder(old.name)
            node.name = node.target = old.name  # also where it is that of a Python function
            node.meta = dict(old.meta)
            if old in numbers:
                self.env[program.inputs[numbers[old]]] = node
                self._localize(node)
            self.numbers.inputs.append(node)
            specs.append(spec)
        take()
        for i, (_, tensor) in enumerate(self.program.constants):
            raise TraceError(
                f"the exported program closes over a tensor of shape {tuple(tensor.shape)}.",
                number=i,
                hint="Export a module that has it as a buffer.",
            )
        return specs, constants

    def _constants(self) -> Iterator[Line]:
        """The lines that are tensors of ours, the same at all points."""
        for lines in zip(*(program.lines for program in self.programs.lines), strict=True):
            if lines[0].op is constant:
                if not all(torch.equal(lines[0].args[0], other.args[0]) for other in lines):
                    raise unsettled("a table of indices")
                yield lines[0]

    def _constant(self, name: str, line: Line) -> InputSpec:
        node = self.nodes.graph.placeholder(f"c_{name}")
        self.nodes.describe(node, self.nodes.fakes.from_tensor(line.args[0]))
        self.env[line.outs[0]] = node  # type: ignore[index]
        return InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name)

    def _localize(self, node: torch.fx.Node) -> None:
        """Gives an input that is a cut parameter the shape of its block."""
        layout = self.layouts.get(self.exported.targets.get(node.name, ""))
        val = node.meta["val"]
        if layout is None:
            return
        shape = TensorType(tuple(val.shape), val.dtype, layout).local_shape(self.rank)
        if shape != tuple(val.shape):
            with self.nodes.fakes:
                local = torch.empty(shape, dtype=val.dtype, device=val.device)
            local.requires_grad_(val.requires_grad)
            if isinstance(val, torch.nn.Parameter):
                local = torch.nn.Parameter(local, requires_grad=val.requires_grad)
            self.nodes.describe(node, local)

    def lines(self) -> None:
        """Adds what the rank runs."""
        for lines in zip(*(program.lines for program in self.programs.lines), strict=True):
            if lines[0].op is not constant:
                self._line(lines)

    def _line(self, lines: Sequence[Line]) -> None:
        lines = [of_ops(line) for line in lines]
        line, source = lines[0], self._source(lines[0])
        args = [
            self._argument(list(at_points))
            for at_points in zip(*(other.args for other in lines), strict=True)
        ]
        kwargs = {
            name: self._argument([dict(other.kwargs)[name] for other in lines])
            for name, _ in line.kwargs
        }
        if line.op is OPAQUE:
            self._opaque(line, args)
            return
        whole = source is not None and line.op is source.target
        name = source.name if whole and source else None
        node = self.nodes.call(line.op, args, kwargs, source, name)
        returns = schema_of(line.op).returns
        if len(returns) == 1 and str(returns[0].type) == "Tensor":
            self.env[line.outs[0]] = node  # type: ignore[index]
            return
        for place, v in zip(places(line), line.outs, strict=True):
            if v is not None:
                self.env[v] = self.nodes.call(operator.getitem, [node, place], {}, source)

    def _source(self, line: Line) -> torch.fx.Node | None:
        """The node that a line comes from; None for what moves results at the end."""
        if line.eqn < 0:
            return None
        outs = [v for v in self.program.eqns[line.eqn].outs if v is not None]
        call = self.program.origin.calls.get(outs[0]) if outs else None
        return None if call is None else call.mark

    def _argument(self, at: Sequence[Any]) -> Any:
        """An argument, from what it is at each point."""
        first = at[0]
        if isinstance(first, Var):
            return self.env[first]
        if isinstance(first, tuple):
            if len({len(value) for value in at}) > 1:
                raise unsettled("the number of pieces")
            return [self._argument(list(entries)) for entries in zip(*at, strict=True)]
        if all(type(value) is type(first) and value == first for value in at):
            return first
        if all(type(value) is float and isnan(value) for value in at):
            return first
        if type(first) is not int:
            raise unsettled(f"the argument {first!r}")
        return self.numbers.of([int(value) for value in at])

    def _opaque(self, line: Line, args: Sequence[Any]) -> None:
        """The node that a call stands for, with its graphs, on what this rank gives it."""
        old = stands_for(line.args[2])
        tensors, sizes = iter(args[0]), iter(args[1])

        def operand(arg: torch.fx.Node) -> Any:
            if arg.op == "get_attr":
                name = str(arg.target)
                if not hasattr(self.root, name):
                    inner = getattr(self.exported.program.graph_module, name)
                    self.root.add_module(name, copy.deepcopy(inner))
                return self.nodes.graph.get_attr(name)
            is_tensor = isinstance(arg.meta.get("val"), torch.Tensor)
            return next(tensors) if is_tensor else next(sizes)

        arguments, keywords = map_arg(old.args, operand), map_arg(old.kwargs, operand)
        node = self.nodes.graph.call_function(old.target, arguments, keywords)  # type: ignore[arg-type]
        node.meta = dict(old.meta)
        vals = old.meta["val"]
        if isinstance(vals, torch.Tensor):
            self.env[line.outs[0]] = node  # type: ignore[index]
            return
        tensors_at = [i for i, val in enumerate(vals) if isinstance(val, torch.Tensor)]
        for place, v in zip(tensors_at, line.outs, strict=True):
            if v is not None:
                self.env[v] = self.nodes.call(operator.getitem, [node, place], {}, old)

    def outputs(self) -> list[OutputSpec]:
        """Adds the output; its specs."""
        specs: list[OutputSpec] = []
        results: list[Any] = []
        tensors = iter(self.programs.lines[0].outs)
        numbers = iter(zip(*self.programs.numbers, strict=True))
        old = self.exported.program.graph_signature.output_specs
        for spec, result in zip(old, self.exported.results, strict=True):
            argument: Any = spec.arg
            if isinstance(result, torch.fx.Node):
                if isinstance(result.meta.get("val"), torch.Tensor):
                    result = self._result(self.env[next(tensors)])
                    argument = TensorArgument(result.name)
                else:
                    at = next(numbers)
                    result = at[0] if len(set(at)) == 1 else self.numbers.of(at)
                    if isinstance(result, torch.fx.Node):
                        argument = SymIntArgument(result.name)
            results.append(result)
            specs.append(OutputSpec(spec.kind, argument, spec.target))
        self.nodes.graph.output(tuple(results))
        return specs

    def _result(self, node: torch.fx.Node) -> torch.fx.Node:
        """A result without derivatives, which would be those of this rank alone."""
        val = node.meta["val"]
        smooth = val.dtype.is_floating_point or val.dtype.is_complex
        if is_whole(self.program) or not smooth:
            return node
        return self.nodes.call(aten.detach.default, [node], {}, None)
