"""`Numbers`: the numbers of a graph that depend on sizes which are not known yet, as nodes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from fdtensor.layouts.errors import TraceError
from fdtensor.parallel.nodes import Nodes
from fdtensor.parallel.sizes import Sizes, emitted, value_at

__all__ = ["Numbers", "unsettled"]

SIZE = torch.ops.aten.sym_size.int


class Numbers:
    """The numbers that depend on sizes, as nodes of a graph: each is made once."""

    def __init__(self, nodes: Nodes, sizes: Sizes) -> None:
        self.nodes, self.sizes = nodes, sizes
        self.inputs: list[torch.fx.Node] = []
        """The inputs, from which sizes are read."""
        self.known: dict[Any, torch.fx.Node] = {}
        """The nodes, by what they are."""

    def of(self, at: Sequence[int]) -> Any:
        """A number that depends on sizes, from what it is at each point."""
        terms = self.sizes.terms(at, "a size of this rank")
        return emitted(terms, self._symbol, self._arithmetic)

    def _arithmetic(self, op: Any, a: Any, b: Any) -> Any:
        if not isinstance(a, torch.fx.Node) and not isinstance(b, torch.fx.Node):
            return op(a, b)
        if (op, a, b) not in self.known:
            self.known[op, a, b] = self.nodes.call(op, [a, b], {}, None, plain=True)
        return self.known[op, a, b]

    def _symbol(self, name: str) -> torch.fx.Node:
        """The value of a symbol, from the input that has it as a size."""
        if name not in self.known:
            self.known[name] = self._read(name)
        return self.known[name]

    def _read(self, name: str) -> torch.fx.Node:
        """The value of a symbol: an input, or arithmetic on a size of one."""
        ways = []
        for node in self.inputs:
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
                node = self.nodes.call(SIZE, [node, dim], {}, None, plain=True)
            low, high = (value_at(size, {name: k}) for k in (0, 1))
            if low:
                node = self._arithmetic(operator.sub, node, low)
            step = high - low
            return node if step == 1 else self._arithmetic(operator.floordiv, node, step)
        raise unsettled(f"the size {name}")


def unsettled(what: str) -> TraceError:
    """The refusal of what a graph cannot say of sizes that are not known yet."""
    return TraceError(
        f"{what} depend on sizes that are not known yet in a way that no program can say.",
        hint="Export the program with these sizes fixed, or cut other dims.",
    )
