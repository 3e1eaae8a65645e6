"""`Source`: where the calls of a graph come from; `Sources` follows that while one is recorded."""

from __future__ import annotations

import sys
import threading
from types import FrameType, TracebackType
from typing import Any

import attrs
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from fdtensor.layouts.callsite import user_place
from fdtensor.layouts.torch_private import current_autograd_node, sequence_number

__all__ = ["Source", "Sources"]


@attrs.frozen
class Source:
    """Where a line of a program comes from: the module and the line of the user that ran it.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    >>> program = trace(model, TensorType((2, 4), torch.float32, Mesh(x=2).layout("x")))
    >>> [program.source(v).module for v in program.outs]
    ['1']
    """

    module: str = ""
    """Its path from the outermost module that was called, `layers.0.attn`; the name of the class
    for the outermost one; empty outside of modules."""
    line: str = ""
    """The file and number of the line: `model.py:44`."""
    is_backward: bool = False
    """Whether the line computes a gradient of that."""

    def __str__(self) -> str:
        backward = "backward of " if self.is_backward else ""
        return backward + ", ".join(filter(None, [self.module, self.line]))


class Sources:
    """A context that knows where each call comes from; `mark()` gives the `Source` of one.

    What autograd computes comes from the call whose gradient it is: both have the number that
    autograd gives its nodes.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.running: list[tuple[FrameType, str]] = []
        """The modules that run, innermost last: the frame of the call of each, and its path."""
        self.paths: dict[int, str] = {}
        """Those of the modules inside of the outermost one, by `id`."""
        self.of_node: dict[int, Source] = {}
        """The source of the call to which a node of autograd belongs, by its number."""
        self.known: dict[tuple[str, str, bool], Source] = {}
        self.hook: Any = None

    def __enter__(self) -> Sources:
        self.hook = register_module_forward_pre_hook(self._enter)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hook.remove()
        self.running.clear()

    def _enter(self, module: torch.nn.Module, *_: Any) -> None:
        if threading.get_ident() != self.thread:
            return
        if not self._innermost():
            self.paths = {id(m): path for path, m in module.named_modules()}
        path = self.paths.get(id(module), "") or type(module).__name__
        self.running.append((sys._getframe(1), path))

    def _innermost(self) -> str:
        """The path of the innermost module that runs; empty outside of modules.

        By the stack, since torch tells of no module that ends with an error while it compiles.
        """
        while self.running:
            frame, path = self.running[-1]
            at: FrameType | None = sys._getframe(1)
            while at is not None and at is not frame:
                at = at.f_back
            if at is not None:
                return path
            self.running.pop()
        return ""

    def mark(self) -> Source:
        """The source of the call that is recorded now."""
        node = current_autograd_node()
        if node is not None:
            forward = self._of(sequence_number(node))
            if forward is not None:
                return self._source(forward.module, forward.line, True)
        source = self._source(self._innermost(), user_place() or "", False)
        if node is None:  # autograd has made the node of this call just before it
            self.of_node.setdefault(sequence_number() - 1, source)
        return source

    def _of(self, number: int) -> Source | None:
        """The source of a node, or of the last one before it that is known."""
        return next((self.of_node[n] for n in range(number, -1, -1) if n in self.of_node), None)

    def _source(self, module: str, line: str, is_backward: bool) -> Source:
        key = module, line, is_backward
        if key not in self.known:
            self.known[key] = Source(*key)
        return self.known[key]
