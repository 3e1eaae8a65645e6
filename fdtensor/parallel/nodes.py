"""`Nodes`: the nodes of a graph as they are made, with what they give and where they come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from fdtensor.layouts.torch_private import (
    FakeTensorMode,
    enable_python_dispatcher,
    extract_tensor_metadata,
)
from fdtensor.parallel.exported import Exported

__all__ = ["Nodes"]

CARRIED = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn", "from_node", "custom")
"""The metadata that a node takes over from the one that it comes from."""


class Nodes:
    """The nodes of a graph as they are made, for the program of a rank of an exported one."""

    def __init__(self, exported: Exported) -> None:
        self.exported = exported
        self.graph = torch.fx.Graph()
        vals = [node.meta["val"] for node in exported.tensors]
        self.fakes = vals[0].fake_mode if vals else FakeTensorMode()

    def call(
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
            self.describe(node, target(*read[0], **read[1]))
        return node

    def describe(self, node: torch.fx.Node, value: Any) -> None:
        """Notes what a node gives."""
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            node.meta["tensor_meta"] = extract_tensor_metadata(value)

    def _outermost(self) -> Iterator[tuple[str, Any]]:
        """The module stack of what is in no module but the whole."""
        for node in self.exported.program.graph.nodes:
            stack = node.meta.get("nn_module_stack")
            if stack:
                yield next(iter(stack.items()))
                return
