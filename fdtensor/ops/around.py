"""`Around`: a context of a function inside a traced one, in which what it reads from around shows.

Branches and loops run such functions: what they read goes in by a gate, what they write to would be
lost, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.torch_private import (
    function_modes,
    transforms_around,
    within_transforms,
)
from fdtensor.ops.call_recorder import CallRecorder
from fdtensor.ops.functional import innermost
from fdtensor.ops.mapped import mapped
from fdtensor.ops.transparent import control_flow

__all__ = ["Around", "noted", "smooth"]


class Around(TorchFunctionMode):
    """A context in which tensors from around it are read through gates.

    Every function of torch is called with them, so it does not matter how a tensor came inside: as
    an argument, from a closure or as a parameter of a module.
    """

    what = "a function"
    """What runs in the context, for errors."""

    def __init__(self) -> None:
        super().__init__()
        self.level = transforms_around()
        """How many transforms of `torch.func` surround it; inside of it there may be more."""
        self.inside: dict[int, torch.Tensor] = {}
        """The tensors that were made inside, by their ids, alive."""
        self.gates: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = {}
        """The tensors from around, each with its gate and the value that is recorded for that."""

    def gate(self, t: torch.Tensor) -> torch.Tensor:
        """What a tensor from around is read as."""
        return t.clone()

    def of(self, t: Any) -> Any:
        """The gate of a tensor from around; anything else as it is."""
        if not isinstance(t, torch.Tensor) or id(t) in self.inside:
            return t  # a number, or what was made inside
        if id(t) not in self.gates:
            with within_transforms(self.level):  # it outlives those inside
                gate = self.gate(t)
                self.gates[id(t)] = t, gate, _recorded(gate)
            self.note(gate)
        return self.gates[id(t)][1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        for kind in types:
            if not issubclass(kind, torch.Tensor):  # it calls the function on what it wraps
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        if name in _OF_TENSORS_THEMSELVES:
            # a view of one from around gets its gate where it is read
            out = func(*args, **kwargs)
            return mapped(out, self.note) if args and id(args[0]) in self.inside else out
        flow = control_flow(func)
        if flow is not None:
            with self:  # its functions run here too
                return mapped(flow(*args, **kwargs), self.note)
        self._refuse_write(name, args, kwargs)
        args, kwargs = mapped((args, kwargs), self.of)
        out = func(*args, **kwargs)
        mapped(out, self.note)
        return out

    def note(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor, which counts as made inside."""
        self.inside[id(t)] = t
        return t

    def _refuse_write(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        writes = writes and name != "requires_grad_"
        written = [*args[:1]] if writes else []
        written += [kwargs["out"]] if kwargs.get("out") is not None else []
        for t in written:
            if isinstance(t, torch.Tensor) and id(t) not in self.inside:
                raise self._writes(f"by {name} ", t)

    def refuse_written(self) -> None:
        """Raises `TraceError` where a tensor from around was written to, as through a view."""
        for t, gate, value in self.gates.values():
            if _recorded(gate) != value:
                raise self._writes("", t)

    def _writes(self, how: str, t: torch.Tensor) -> TraceError:
        return TraceError(
            f"{self.what} writes {how}to a tensor from around it.",
            tensor=f"{tuple(t.shape)} {t.dtype}",
            line=user_line() or "not known",
            hint="Return the new value instead.",
        )


def noted(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, which count as made inside of what is recorded now."""
    for mode in function_modes():
        if isinstance(mode, Around):
            for t in tensors:
                mode.note(t)
    return [*tensors]


_OF_TENSORS_THEMSELVES = {
    *("__get__", "__set__", "__len__", "__hash__", "size", "dim", "ndimension", "stride"),
    *("numel", "element_size", "is_floating_point", "is_complex"),
}
"""Functions that read no element of a tensor."""


def smooth(t: torch.Tensor) -> bool:
    """Whether a tensor may have a derivative."""
    return t.is_floating_point() or t.is_complex()


def _recorded(t: torch.Tensor) -> Any:
    """The value that stands for a tensor at this time."""
    recorder = CallRecorder.running[-1]
    return recorder.known(recorder.fake(innermost(t)))
