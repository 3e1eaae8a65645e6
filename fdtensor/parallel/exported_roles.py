"""`uses_of`: what the parameters of an exported program are to the ops that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
import torch.fx

from fdtensor.layouts.torch_private import HigherOrderOperator
from fdtensor.parallel.exported import Exported, modules_of
from fdtensor.parallel.roles import BIAS, Role

__all__ = ["Use", "role_in", "uses_of"]

aten = torch.ops.aten


@attrs.frozen
class Use:
    """An op that reads a parameter, maybe in the graph of a higher-order op."""

    top: torch.fx.Node
    """The op, or the higher-order one that has it."""
    modules: tuple[str, ...]
    """The modules that it is in."""
    role: Role


def uses_of(exported: Exported) -> dict[str, list[Use]]:
    """The uses of each parameter, in order, by its name in the module."""
    order = {node: i for i, node in enumerate(exported.program.graph.nodes)}
    uses: dict[str, list[Use]] = {}
    for node in exported.tensors:
        if node.name in exported.targets:
            ways = _uses(node, tuple(range(node.meta["val"].ndim)))
            uses[exported.targets[node.name]] = sorted(ways, key=lambda use: order[use.top])
    return uses


def role_in(uses: Sequence[Use], module: str) -> Role | None:
    """The role of a parameter in the first op of a module that reads it, else in any op."""
    own = [use for use in uses if module in use.modules]
    return next((use.role for use in [*own, *uses]), None)


def _uses(node: torch.fx.Node, dims: tuple[int, ...]) -> Iterator[Use]:
    """The uses of a node whose dims are these of a parameter."""
    for user in node.users:
        target, args = user.target, user.args
        if target in _SAME and args[0] is node:
            yield from _uses(user, dims)
        elif target in _TURNS and args[0] is node:
            order = _TURNS[target](len(dims), *args[1:])
            yield from _uses(user, tuple(dims[d] for d in order))
        elif isinstance(target, HigherOrderOperator):
            for inner in _inside(node, user):
                yield from (attrs.evolve(use, top=user) for use in _uses(inner, dims))
        else:
            place = next((i for i, a in enumerate(args) if a is node), -1)
            role = _role(target, place, dims, args)
            if role is not None:
                yield Use(user, tuple(modules_of(user)), role)


def _inside(node: torch.fx.Node, user: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The value of a node in the graphs that a higher-order op runs."""
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
