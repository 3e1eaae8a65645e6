"""`Exported`: a functional exported program as a function of full tensors, to be recorded."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from fdtensor.layouts.torch_private import HigherOrderOperator, OpOverload
from fdtensor.ops.graph import Full, Graph
from fdtensor.ops.pins import constrain
from fdtensor.ops.randomness import refuse_random
from fdtensor.ops.recorder import record
from fdtensor.parallel.sizes import Point, value_at
from fdtensor.parallel.styles import BIAS, Role

__all__ = ["OPAQUE", "Exported", "Pins", "opaque", "opened", "roles_of", "stands_for"]

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
        """What it returns: nodes, and Python values."""
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
                values.append(tensor_of[node] if node in tensor_of else _plain(value, point))
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


def _plain(value: Any, point: Point) -> Any:
    """An input that is no tensor: a size, or a Python value."""
    return value_at(value, point) if isinstance(value, torch.SymInt) else value


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
        names = _modules(n)
        for name in reversed(names):  # the innermost first
            if name in self.pins and any(name not in _modules(user) for user in n.users):
                result = self._pinned(result, name, False)
        return result

    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> Any:
        names = [name for name in _modules(n) if name in self.pins]
        if not names or n.op != "call_function":
            return super().fetch_args_kwargs_from_env(n)

        def value(arg: torch.fx.Node) -> Any:
            result = self.env[arg]
            if not isinstance(result, torch.Tensor) or arg.name in self.parameters:
                return result
            for name in names:
                if name not in _modules(arg):
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
        return _opaque(self.node, args, kwargs, self.point)


_CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
}
"""Calls that only check what the program was exported for."""


def _modules(node: torch.fx.Node) -> list[str]:
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


# --- ops that are kept as they are, on replicated operands ----------------------------------------

torch.library.define("fdtensor::opaque", "(Tensor[] xs, SymInt[] sizes, str key) -> Tensor[]")
OPAQUE = torch.ops.fdtensor.opaque.default

_KNOWN: dict[str, tuple[torch.fx.Node, list[Full]]] = {}
"""By the key of an opaque call, the node that it stands for and what it gives."""


@contextlib.contextmanager
def opaque() -> Iterator[None]:
    """Within, calls that stand for nodes are known."""
    try:
        yield
    finally:
        _KNOWN.clear()


def stands_for(key: str) -> torch.fx.Node:
    """The node that an opaque call with this key stands for."""
    return _KNOWN[key][0]


@functools.partial(torch.library.impl, "fdtensor::opaque", "CompositeExplicitAutograd")
def _made(xs: Sequence[torch.Tensor], _sizes: Sequence[int], key: str) -> list[torch.Tensor]:
    device = xs[0].device if xs else "cpu"
    return [torch.empty(t.shape, dtype=t.dtype, device=device) for t in _KNOWN[key][1]]


def _opaque(node: torch.fx.Node, args: Any, kwargs: Any, point: Point) -> Any:
    """What a higher-order op gives, as a call that stands for it."""
    tensors: list[torch.Tensor] = []
    sizes: list[int] = []
    for graph in _leaves((args, kwargs)):
        if isinstance(graph, torch.fx.GraphModule):
            _quiet(graph)
    for value, argument in zip(
        _leaves((node.args, node.kwargs)), _leaves((args, kwargs)), strict=True
    ):
        if isinstance(argument, torch.Tensor):
            tensors.append(argument)
        elif isinstance(value, torch.fx.Node) and isinstance(argument, int):
            sizes.append(argument)
    results = list(_leaves(node.meta["val"]))
    fulls = [
        Full(tuple(value_at(n, point) for n in t.shape), t.dtype)
        for t in results
        if isinstance(t, torch.Tensor)
    ]
    key = f"{id(node)}"
    _KNOWN[key] = node, fulls
    tensors_made = iter(OPAQUE(tensors, sizes, key))
    out = [next(tensors_made) if isinstance(t, torch.Tensor) else _plain(t, point) for t in results]
    return out[0] if isinstance(node.meta["val"], torch.Tensor) else tuple(out)


def _quiet(module: torch.fx.GraphModule) -> None:
    """Refuses a graph in which each rank would draw random numbers of its own."""
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload):
            refuse_random(node.target, node.args)
    for inner in module.children():
        if isinstance(inner, torch.fx.GraphModule):
            _quiet(inner)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for entry in tree:
            yield from _leaves(entry)
    elif isinstance(tree, dict):
        yield from _leaves(tuple(tree.values()))
    else:
        yield tree


# --- what parameters are to the ops that read them -----------------------------------------------


def roles_of(exported: Exported) -> dict[str, Role]:
    """The role of each parameter in the first op that reads it, by the name of its input."""
    order = {node: i for i, node in enumerate(exported.program.graph.nodes)}
    role_of: dict[str, Role] = {}
    for node in exported.tensors:
        if node.name in exported.targets:
            ways = _roles(node, tuple(range(node.meta["val"].ndim)))
            roles = sorted(ways, key=lambda pair: order[pair[0]])
            if roles:
                role_of[node.name] = roles[0][1]
    return role_of


def _roles(node: torch.fx.Node, dims: tuple[int, ...]) -> Iterator[tuple[torch.fx.Node, Role]]:
    """The ops that read a node, whose dims are these of a parameter, and what it is to them."""
    for user in node.users:
        target, args = user.target, user.args
        if target in _SAME and args[0] is node:
            yield from _roles(user, dims)
        elif target in _TURNS and args[0] is node:
            order = _TURNS[target](len(dims), *args[1:])
            yield from _roles(user, tuple(dims[d] for d in order))
        elif isinstance(target, HigherOrderOperator):
            for inner in _inside(node, user):
                yield from ((user, role) for _, role in _roles(inner, dims))
        else:
            place = next((i for i, a in enumerate(args) if a is node), -1)
            role = _role(target, place, dims, args)
            if role is not None:
                yield user, role


def _inside(node: torch.fx.Node, user: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """What a node is in the graphs that a higher-order op runs."""
    operands = [a for arg in user.args if isinstance(arg, (tuple, list)) for a in arg]
    for arg in user.args:
        if isinstance(arg, torch.fx.Node) and arg.op == "get_attr" and node in operands:
            graph = getattr(user.graph.owning_module, str(arg.target)).graph
            inputs = [n for n in graph.nodes if n.op == "placeholder"]
            if len(inputs) == len(operands):
                yield inputs[operands.index(node)]


def _role(target: Any, place: int, dims: tuple[int, ...], args: Sequence[Any]) -> Role | None:
    name = str(target).removeprefix("aten.").split(".")[0]
    if len(dims) == 1:
        known = _BIASES.get(name)
        return BIAS if known is not None and place in known else None
    two = len(dims) == 2
    if name == "linear" and place == 1:
        return Role("linear", dims[0], dims[1])
    if two and (name, place) in {("addmm", 2), ("mm", 1), ("matmul", 1)}:
        return Role("linear", dims[1], dims[0])
    if two and (name, place) in {("mm", 0), ("matmul", 0), ("addmm", 1)}:
        return Role("linear", dims[0], dims[1])
    if name in ("embedding", "embedding_bag", "_embedding_bag") and place == 0:
        return Role("embedding", dims[1], dims[0])
    if name.startswith("conv") and place == 1 and len(dims) > 2:
        turned = "transpose" in name or (name == "convolution" and bool(args[6]))
        return (
            Role("convolution", dims[1], dims[0])
            if turned
            else Role("convolution", dims[0], dims[1])
        )
    return None


_BIASES = {
    "linear": (2,),
    "addmm": (0,),
    "add": (0, 1),
    **{f"conv{n}d": (2,) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": (2,) for n in (1, 2, 3)},
    "convolution": (2,),
}

_SAME = {
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.to.dtype,
}

_TURNS: dict[Any, Callable[..., Sequence[int]]] = {
    aten.t.default: lambda n: range(n)[::-1],
    aten.numpy_T.default: lambda n: range(n)[::-1],
    aten.permute.default: lambda n, order: [d % n for d in order],
    aten.transpose.int: lambda n, a, b: [{a % n: b % n, b % n: a % n}.get(d, d) for d in range(n)],
}
