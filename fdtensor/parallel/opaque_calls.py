"""`opaque_call`: what stands for an op that is kept as it is, on replicated operands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx

from fdtensor.layouts.torch_private import OpOverload
from fdtensor.ops.graph import Full
from fdtensor.ops.own_ops import own_op
from fdtensor.ops.randomness import refuse_random
from fdtensor.parallel.sizes import Point, input_at, value_at

__all__ = ["OPAQUE", "opaque_call", "opaque_calls", "stands_for"]

_KNOWN: dict[str, tuple[torch.fx.Node, list[Full]]] = {}
"""By the key of an opaque call, the node that it stands for and what it gives."""


@contextlib.contextmanager
def opaque_calls() -> Iterator[None]:
    """Within, calls that stand for nodes are known."""
    try:
        yield
    finally:
        _KNOWN.clear()


def stands_for(key: str) -> torch.fx.Node:
    """The node that an opaque call with this key stands for."""
    return _KNOWN[key][0]


def _empty(xs: Sequence[torch.Tensor], _sizes: Sequence[int], key: str) -> list[torch.Tensor]:
    device = xs[0].device if xs else "cpu"
    return [torch.empty(t.shape, dtype=t.dtype, device=device) for t in _KNOWN[key][1]]


OPAQUE = own_op("opaque(Tensor[] xs, SymInt[] sizes, str key) -> Tensor[]", _empty)


def opaque_call(node: torch.fx.Node, args: Any, kwargs: Any, point: Point) -> Any:
    """The results of a higher-order op, as a call that stands for it."""
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
    stand_ins = iter(OPAQUE(tensors, sizes, key))
    out = [next(stand_ins) if isinstance(t, torch.Tensor) else input_at(t, point) for t in results]
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
