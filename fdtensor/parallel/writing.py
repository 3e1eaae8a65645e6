"""`written`: the exported program of one rank, from the lines that it runs and what they were."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
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
from fdtensor.layouts.torch_private import (
    FakeTensorMode,
    enable_python_dispatcher,
    extract_tensor_metadata,
    schema_of,
)
from fdtensor.ops.graph import Var
from fdtensor.parallel.exported import OPAQUE, Exported, stands_for
from fdtensor.parallel.sizes import Sizes, emitted, value_at
from fdtensor.parallel.styles import identity
from fdtensor.plans.collectives import local_step
from fdtensor.plans.planner import plan
from fdtensor.programs.program import Program
from fdtensor.runtime.fx import is_whole, places
from fdtensor.runtime.local_program import Line, LocalProgram, constant, of_ops

__all__ = ["Made", "written"]

aten = torch.ops.aten

CARRIED = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn", "from_node", "custom")
"""What a node takes over from the one that it comes from."""


@attrs.frozen(eq=False)
class Made:
    """What a rank runs, at each point of the sizes that are not known yet."""

    sizes: Sizes
    programs: tuple[Program, ...]
    lines: tuple[LocalProgram, ...]
    numbers: tuple[Sequence[int], ...]
    """What is returned that is no tensor."""


def written(
    exported: Exported, made: Made, layouts: Mapping[str, Layout], rank: int
) -> ExportedProgram:
    """The exported program with the lines of `rank` and its blocks of the state."""
    writer = _Writer(exported, made, layouts, rank)
    inputs, constants = writer.inputs()
    writer.lines()
    outputs = writer.outputs()
    writer.graph.lint()
    old = exported.program
    entries = [copy.copy(entry) for entry in old.module_call_graph]
    for entry in entries[1:]:
        entry.signature = None  # it would name nodes that are no more
    return ExportedProgram(
        torch.fx.GraphModule(writer.root, writer.graph),
        writer.graph,
        ExportGraphSignature(inputs, outputs),
        _blocks(old.state_dict, layouts, rank),
        dict(old.range_constraints),
        entries,
        old.example_inputs,
        {**old.constants, **constants},
        verifiers=old.verifiers,
    )


def _blocks(
    state: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout], rank: int
) -> dict[str, torch.Tensor]:
    """The blocks of a rank: those of tensors that are one are one."""
    blocks: dict[Any, torch.Tensor] = {}
    for name, tensor in state.items():
        key = identity(tensor)
        if key not in blocks:
            blocks[key] = _block(tensor, layouts[name], rank)
    return {name: blocks[identity(tensor)] for name, tensor in state.items()}


def _block(tensor: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    whole = TensorType(tuple(tensor.shape), tensor.dtype, layout.mesh.layout())
    local = tensor.detach().clone() if whole.layout == layout else tensor.detach()
    for step in plan(whole, whole.with_layout(layout)).steps:
        local = local_step(step, rank, local)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(local, requires_grad=tensor.requires_grad)
    return local


class _Writer:
    """The nodes of a graph as they are made."""

    def __init__(
        self, exported: Exported, made: Made, layouts: Mapping[str, Layout], rank: int
    ) -> None:
        self.exported, self.made, self.layouts, self.rank = exported, made, layouts, rank
        self.graph = torch.fx.Graph()
        self.root = torch.nn.Module()
        self.env: dict[Var, torch.fx.Node] = {}
        self.given: dict[str, torch.fx.Node] = {}
        """The inputs, by name."""
        self.known: dict[Any, torch.fx.Node] = {}
        """Numbers that are made of sizes, by what they are."""
        vals = [node.meta["val"] for node in exported.tensors]
        self.fakes = vals[0].fake_mode if vals else FakeTensorMode()
        first, *others = made.lines
        for other in others:
            if [line.op for line in other.lines] != [line.op for line in first.lines]:
                raise _unsettled("the lines of this rank")

    # --- inputs ----------------------------------------------------------------------------------

    def inputs(self) -> tuple[list[InputSpec], dict[str, torch.Tensor]]:
        """Adds the inputs, numbers of ours before those of the user; their specs and values."""
        specs: list[InputSpec] = []
        constants: dict[str, torch.Tensor] = {}
        program = self.made.lines[0]
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
            node = self.graph.placeholder(old.name)
            node.name = node.target = old.name  # also where it is that of a Python function
            node.meta = dict(old.meta)
            if old in numbers:
                self.env[program.inputs[numbers[old]]] = node
                self._localize(node)
            self.given[old.name] = node
            specs.append(spec)
        take()
        for i, (_, tensor) in enumerate(self.made.programs[0].constants):
            raise TraceError(
                f"the exported program closes over a tensor of shape {tuple(tensor.shape)}.",
                number=i,
                hint="Export a module that has it as a buffer.",
            )
        return specs, constants

    def _constants(self) -> Iterator[Line]:
        """The lines that are tensors of ours, the same at all points."""
        for lines in zip(*(program.lines for program in self.made.lines), strict=True):
            if lines[0].op is constant:
                if not all(torch.equal(lines[0].args[0], other.args[0]) for other in lines):
                    raise _unsettled("a table of indices")
                yield lines[0]

    def _constant(self, name: str, line: Line) -> InputSpec:
        node = self.graph.placeholder(f"c_{name}")
        self._describe(node, self.fakes.from_tensor(line.args[0]))
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
            with self.fakes:
                local = torch.empty(shape, dtype=val.dtype, device=val.device)
            local.requires_grad_(val.requires_grad)
            if isinstance(val, torch.nn.Parameter):
                local = torch.nn.Parameter(local, requires_grad=val.requires_grad)
            self._describe(node, local)

    # --- lines -----------------------------------------------------------------------------------

    def lines(self) -> None:
        """Adds what the rank runs."""
        for lines in zip(*(program.lines for program in self.made.lines), strict=True):
            if lines[0].op is not constant:
                self._line(lines)

    def _line(self, lines: Sequence[Line]) -> None:
        lines = [of_ops(line) for line in lines]
        line, source = lines[0], self._source(lines[0])
        args = [
            self._given(list(at_points))
            for at_points in zip(*(other.args for other in lines), strict=True)
        ]
        kwargs = {
            name: self._given([dict(other.kwargs)[name] for other in lines])
            for name, _ in line.kwargs
        }
        if line.op is OPAQUE:
            self._opaque(line, args)
            return
        whole = source is not None and line.op is source.target
        node = self._call(line.op, args, kwargs, source, source.name if whole and source else None)
        returns = schema_of(line.op).returns
        if len(returns) == 1 and str(returns[0].type) == "Tensor":
            self.env[line.outs[0]] = node  # type: ignore[index]
            return
        for place, v in zip(places(line), line.outs, strict=True):
            if v is not None:
                self.env[v] = self._call(operator.getitem, [node, place], {}, source)

    def _source(self, line: Line) -> torch.fx.Node | None:
        """The node that a line comes from; None for what moves results at the end."""
        if line.eqn < 0:
            return None
        program = self.made.programs[0]
        outs = [v for v in program.eqns[line.eqn].outs if v is not None]
        call = program.origin.calls.get(outs[0]) if outs else None
        return None if call is None else call.mark

    def _given(self, at: Sequence[Any]) -> Any:
        """An argument, from what it is at each point."""
        first = at[0]
        if isinstance(first, Var):
            return self.env[first]
        if isinstance(first, tuple):
            if len({len(value) for value in at}) > 1:
                raise _unsettled("the number of pieces")
            return [self._given(list(entries)) for entries in zip(*at, strict=True)]
        if all(type(value) is type(first) and value == first for value in at):
            return first
        if type(first) is not int:
            raise _unsettled(f"the argument {first!r}")
        return self._number([int(value) for value in at])

    def _number(self, at: Sequence[int]) -> Any:
        """A number that depends on sizes, from what it is at each point."""
        terms = self.made.sizes.terms(at, "a size of this rank")
        return emitted(terms, self._symbol, self._arithmetic)

    def _arithmetic(self, op: Any, a: Any, b: Any) -> Any:
        if not isinstance(a, torch.fx.Node) and not isinstance(b, torch.fx.Node):
            return op(a, b)
        if (op, a, b) not in self.known:
            self.known[op, a, b] = self._call(op, [a, b], {}, None, plain=True)
        return self.known[op, a, b]

    def _symbol(self, name: str) -> torch.fx.Node:
        """The value of a symbol, from the input that has it as a size."""
        if name not in self.known:
            self.known[name] = self._read(name)
        return self.known[name]

    def _read(self, name: str) -> torch.fx.Node:
        ways = []
        for node in self.given.values():
            val = node.meta.get("val")
            if isinstance(val, torch.SymInt):
                ways.append((val, node, None))
            elif isinstance(val, torch.Tensor):
                ways += [
                    (n, node, d) for d, n in enumerate(val.shape) if isinstance(n, torch.SymInt)
                ]
        usual = [way for way in ways if str(way[0].node.expr) == name]
        for size, node, dim in usual or ways:
            if {str(s) for s in size.node.expr.free_symbols} != {name}:
                continue
            if dim is not None:
                node = self._call(aten.sym_size.int, [node, dim], {}, None, plain=True)
            low, high = (value_at(size, {name: k}) for k in (0, 1))
            if low:
                node = self._arithmetic(operator.sub, node, low)
            step = high - low
            return node if step == 1 else self._arithmetic(operator.floordiv, node, step)
        raise _unsettled(f"the size {name}")

    def _opaque(self, line: Line, args: Sequence[Any]) -> None:
        """The node that a call stands for, with its graphs, on what it is given here."""
        old = stands_for(line.args[2])
        tensors, sizes = iter(args[0]), iter(args[1])

        def given(arg: torch.fx.Node) -> Any:
            if arg.op == "get_attr":
                name = str(arg.target)
                if not hasattr(self.root, name):
                    inner = getattr(self.exported.program.graph_module, name)
                    self.root.add_module(name, copy.deepcopy(inner))
                return self.graph.get_attr(name)
            is_tensor = isinstance(arg.meta.get("val"), torch.Tensor)
            return next(tensors) if is_tensor else next(sizes)

        arguments, keywords = map_arg(old.args, given), map_arg(old.kwargs, given)
        node = self.graph.call_function(old.target, arguments, keywords)  # type: ignore[arg-type]
        node.meta = dict(old.meta)
        vals = old.meta["val"]
        if isinstance(vals, torch.Tensor):
            self.env[line.outs[0]] = node  # type: ignore[index]
            return
        tensors_at = [i for i, val in enumerate(vals) if isinstance(val, torch.Tensor)]
        for place, v in zip(tensors_at, line.outs, strict=True):
            if v is not None:
                self.env[v] = self._call(operator.getitem, [node, place], {}, old)

    # --- outputs ---------------------------------------------------------------------------------

    def outputs(self) -> list[OutputSpec]:
        """Adds the output; its specs."""
        specs: list[OutputSpec] = []
        results: list[Any] = []
        tensors = iter(self.made.lines[0].outs)
        numbers = iter(zip(*self.made.numbers, strict=True))
        old = self.exported.program.graph_signature.output_specs
        for spec, result in zip(old, self.exported.results, strict=True):
            argument: Any = spec.arg
            if isinstance(result, torch.fx.Node):
                if isinstance(result.meta.get("val"), torch.Tensor):
                    result = self._result(self.env[next(tensors)])
                    argument = TensorArgument(result.name)
                else:
                    at = next(numbers)
                    result = at[0] if len(set(at)) == 1 else self._number(at)
                    if isinstance(result, torch.fx.Node):
                        argument = SymIntArgument(result.name)
            results.append(result)
            specs.append(OutputSpec(spec.kind, argument, spec.target))
        self.graph.output(tuple(results))
        return specs

    def _result(self, node: torch.fx.Node) -> torch.fx.Node:
        """A result without derivatives, which would be those of this rank alone."""
        val = node.meta["val"]
        smooth = val.dtype.is_floating_point or val.dtype.is_complex
        if is_whole(self.made.programs[0]) or not smooth:
            return node
        return self._call(aten.detach.default, [node], {}, None)

    # --- nodes -----------------------------------------------------------------------------------

    def _call(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        source: torch.fx.Node | None,
        name: str | None = None,
        plain: bool = False,
    ) -> torch.fx.Node:
        """A node with what it gives, and where it comes from unless it is `plain`."""
        node = self.graph.create_node("call_function", target, tuple(args), dict(kwargs), name=name)
        if source is not None:
            node.meta.update({key: source.meta[key] for key in CARRIED if key in source.meta})
        elif not plain:
            node.meta["nn_module_stack"] = dict(self._outermost())
        read = map_arg((tuple(args), dict(kwargs)), lambda n: n.meta["val"])
        with self.fakes, enable_python_dispatcher(), torch.no_grad():
            self._describe(node, target(*read[0], **read[1]))
        return node

    def _outermost(self) -> Iterator[tuple[str, Any]]:
        """The module stack of what is in no module but the whole."""
        for node in self.exported.program.graph.nodes:
            stack = node.meta.get("nn_module_stack")
            if stack:
                yield next(iter(stack.items()))
                return

    def _describe(self, node: torch.fx.Node, value: Any) -> None:
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            node.meta["tensor_meta"] = extract_tensor_metadata(value)


def _unsettled(what: str) -> TraceError:
    return TraceError(
        f"{what} depend on sizes that are not known yet in a way that no program can say.",
        hint="Export the program with these sizes fixed, or cut other dims.",
    )
