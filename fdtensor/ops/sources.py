"""`Source`: where the calls of a graph come from; `Sources` tells it while one is recorded."""

from __future__ import annotations

import sys
from bisect import bisect_right
from types import CodeType, FrameType

import attrs
import torch

from fdtensor.layouts.callsite import user_place
from fdtensor.layouts.torch_private import call_of_modules, current_autograd_node, sequence_number

__all__ = ["Source", "Sources"]

_CALL: CodeType = call_of_modules.__code__

_OF_LEAVES = 2**63
"""Nodes that add up the gradients of leaves, which belong to no call, have numbers from here on."""


@attrs.frozen
class Source:
    """Where a line of a program comes from: the module and the line of the user that ran it.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    >>> program = trace(model, TensorType((2, 4), torch.float32, Mesh(x=2).layout("x")))
    >>> [program.source(v).module for v in program.outs]
    ['1']
    """

    module: str = ""
    """Its path from the outermost module that was called, "layers.0.attn"; the name of the class
    for the outermost one; empty outside of modules."""
    line: str = ""
    """The file and number of the line: `model.py:44`."""
    is_backward: bool = False
    """Whether the line computes a gradient of that."""

    def __str__(self) -> str:
        backward = "backward of " if self.is_backward else ""
        return backward + ", ".join(filter(None, [self.module, self.line]))


class Sources:
    """Knows where each call comes from, by the stack: `mark()` gives the `Source` of one.

    What autograd computes comes from the call whose gradient it is: both have the number that
    autograd gives its nodes.
    """

    def __init__(self) -> None:
        self.outside: CodeType = sys._getframe(1).f_code
        """What makes it, around which modules do not count."""
        self.paths: dict[int, tuple[torch.nn.Module, dict[int, str]]] = {}
        """For each outermost module the paths of those inside of it, all by `id`."""
        self.nodes: list[int] = []
        """The numbers of nodes of autograd, ascending."""
        self.of_nodes: list[Source] = []
        """The source of the call to which each of them belongs."""
        self.known: dict[tuple[str, str, bool], Source] = {}

    def mark(self) -> Source:
        """The source of the call that is recorded now."""
        node = current_autograd_node()
        if node is not None:
            forward = self._of(sequence_number(node))
            if forward is not None:
                return self._source(forward.module, forward.line, True)
        source = self._source(self._module(), user_place() or "", False)
        if node is None:  # autograd has made the node of this call just before it
            number = sequence_number() - 1
            if not self.nodes or self.nodes[-1] < number:
                self.nodes.append(number)
                self.of_nodes.append(source)
        return source

    def _module(self) -> str:
        """The path of the innermost module that runs; empty outside of modules."""
        running: list[torch.nn.Module] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self.outside:
            if frame.f_code is _CALL:
                running.append(frame.f_locals["self"])
            frame = frame.f_back
        if not running:
            return ""
        root = running[-1]
        if id(root) not in self.paths:  # kept with it, as an id means an object that lives
            self.paths[id(root)] = root, {id(m): path for path, m in root.named_modules()}
        names = self.paths[id(root)][1].get(id(running[0]), "").split(".")
        path = ".".join(name for name in names if name != "_orig_mod")  # of torch.compile
        return path or type(running[0]).__name__

    def _of(self, number: int) -> Source | None:
        """The source of a node, or of the last one before it that is known."""
        place = bisect_right(self.nodes, number)
        return self.of_nodes[place - 1] if place and number < _OF_LEAVES else None

    def _source(self, module: str, line: str, is_backward: bool) -> Source:
        key = module, line, is_backward
        if key not in self.known:
            self.known[key] = Source(*key)
        return self.known[key]
