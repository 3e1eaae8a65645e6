"""`Exported`: a functional exported program as a function of full tensors, to be recorded."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.node import map_arg

from fdtensor.layouts.errors import DataDependentError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import HigherOrderOperator
from fdtensor.ops.graph import Full, Graph
from fdtensor.ops.pins import constrain
from fdtensor.ops.recorder import record
from fdtensor.parallel.opaque_calls import opaque_call
from fdtensor.parallel.sizes import Point, input_at, value_at

__all__ = ["Exported", "Pins", "modules_of", "opened"]

aten = torch.ops.aten

Pins = Mapping[str, Callable[[bool, int], Layout | None]]
"""By the name of a module, the layout of what goes in (or, if False, comes out) of so many dims."""


@attrs.frozen(eq=False)
class Exported:
    """An exported program whose ops write to nothing."""

    program: ExportedProgram

    @functools.cached_property
    def placeholders(self) -> dict[str, torch.fx.Node]:
        """The inputs, by name, in order."""
        nodes = self.program.graph.nodes
        return {node.name: node for node in nodes if node.op == "placeholder"}

    @functools.cached_property
    def tensors(self) -> list[torch.fx.Node]:
        """The inputs that are tensors, in order."""
        return [n for n in self.placeholders.values() if _is_tensor(n.meta.get("val"))]

    @functools.cached_property
    def targets(self) -> dict[str, str]:
        """The name in the module of each input that is a parameter or buffer."""
        specs = self.program.graph_signature.input_specs
        kinds = (InputKind.PARAMETER, InputKind.BUFFER)
        return {s.arg.name: s.target for s in specs if s.kind in kinds and s.target is not None}

    @property
    def results(self) -> Sequence[Any]:
        """The results: nodes, and Python values."""
        return self.program.graph.output_node().args[0]  # type: ignore[return-value]

    def types(self, point: Point) -> list[Full]:
        """The types of the inputs that are tensors, at a point."""
        vals = [node.meta["val"] for node in self.tensors]
        return [Full(tuple(value_at(n, point) for n in v.shape), v.dtype) for v in vals]

    def typed(
        self, fulls: Sequence[Full], layouts: Mapping[str, Layout], mesh: Mesh
    ) -> list[TensorType]:
        """The types of the inputs that are tensors, replicated but for parameters."""
        layout_of = [layouts.get(self.targets.get(node.name, "")) for node in self.tensors]
        return [
            TensorType(f.shape, f.dtype, layout or mesh.layout())
            for f, layout in zip(fulls, layout_of, strict=True)
        ]

    def recorded(self, point: Point, pins: Pins, device: str) -> tuple[Graph, list[int]]:
        """The graph at a point, each call marked with its node, and the numbers it returns.

        Raises `DataDependentError` where shapes depend on the values of tensors.
        """
        numbers: list[list[int]] = []
        runs: list[_Run] = []

        def flat(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            tensor_of = dict(zip(self.tensors, tensors, strict=True))
            run = _Run(self.program.graph_module, point, pins, set(self.targets))
            runs.append(run)
            values = []
            for node in self.placeholders.values():
                value = node.meta.get("val")
                values.append(tensor_of[node] if node in tensor_of else input_at(value, point))
            outputs = run.run(*values)
            numbers.append(
                [x for x, node in zip(outputs, self.results, strict=True) if _is_number(x, node)]
            )
            return [x for x in outputs if isinstance(x, torch.Tensor)]

        types = self.types(point)
        try:
            graph = record(flat, types, device=device, mark=lambda: runs[-1].node if runs else None)
        except DataDependentError as error:
            raise DataDependentError(
                f"node {_where(runs)!r} of the exported program depends on the values of tensors.",
                found=error.sentence,
                hint="Export the model in parts, without what chooses shapes by values.",
            ) from error
        return graph, numbers[-1]


def _where(runs: Sequence[_Run]) -> str:
    return str(runs[-1].node) if runs else ""


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_number(value: Any, node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and not isinstance(value, torch.Tensor)


def opened(program: ExportedProgram) -> Exported:
    """The exported program, without writes to its inputs; the one given is left as it is."""
    if program.dialect == "TRAINING":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch copies a class of its own
            program = program.run_decompositions({})
    return Exported(program)


class _Run(torch.fx.Interpreter):
    """Runs a graph on full tensors, with what modules take and give pinned."""

    def __init__(self, module: Any, point: Point, pins: Pins, parameters: set[str]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.point, self.pins, self.parameters = point, pins, parameters
        self.node: torch.fx.Node | None = None
        self.taken: dict[tuple[str, torch.fx.Node], Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        self.node = n if n.op == "call_function" else self.node
        result = super().run_node(n)
        if not isinstance(result, torch.Tensor) or n.op != "call_function":
            return result
        names = modules_of(n)
        for name in reversed(names):  # the innermost first
            if name in self.pins and any(name not in modules_of(user) for user in n.users):
                result = self._pinned(result, name, False)
        return result

    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> Any:
        names = [name for name in modules_of(n) if name in self.pins]
        if not names or n.op != "call_function":
            return super().fetch_args_kwargs_from_env(n)

        def value(arg: torch.fx.Node) -> Any:
            result = self.env[arg]
            if not isinstance(result, torch.Tensor) or arg.name in self.parameters:
                return result
            for name in names:
                if name not in modules_of(arg):
                    key = name, arg
                    if key not in self.taken:
                        self.taken[key] = self._pinned(result, name, True)
                    result = self.taken[key]
            return result

        return map_arg(n.args, value), map_arg(n.kwargs, value)

    def _pinned(self, tensor: torch.Tensor, name: str, entering: bool) -> torch.Tensor:
        layout = self.pins[name](entering, tensor.ndim)
        return tensor if layout is None else constrain(tensor, layout)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _CHECKS:
            return None
        if not isinstance(target, HigherOrderOperator):
            return super().call_function(target, args, kwargs)
        inner = _inlined(target, args)
        if inner is not None:
            module, operands = inner
            return tuple(_Run(module, self.point, {}, set()).run(*operands))
        assert self.node is not None
        return opaque_call(self.node, args, kwargs, self.point)


_CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
}
"""Calls that only check what the program was exported for."""


def modules_of(node: torch.fx.Node) -> list[str]:
    """The names of the modules that a node is in, the outermost first."""
    return [name for name, _ in node.meta.get("nn_module_stack", {}).values()]


def _inlined(target: Any, args: Sequence[Any]) -> tuple[Any, Sequence[Any]] | None:
    """The graph that a higher-order op just runs, and what it is given; None for others."""
    modules = [a for a in args if isinstance(a, torch.fx.GraphModule)]
    if target.name() not in _WRAPPERS or len(modules) != 1:
        return None
    after = list(args).index(modules[0]) + 1
    operands = args[after:]
    if operands and isinstance(operands[0], str):  # a name for the graph
        operands = operands[1:]
    return modules[0], operands


_WRAPPERS = {
    "wrap",
    "wrap_with_set_grad_enabled",
    "wrap_with_autocast",
    "wrap_activation_checkpoint",
    "tag_activation_checkpoint",
    "invoke_subgraph",
}
