"""`write_error`: the error for a write to a tensor that a recorded function closes over."""

from __future__ import annotations

import inspect
from types import FrameType

import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import TraceError

__all__ = ["AS_BUFFERS", "write_error"]

AS_BUFFERS = (
    "Give the buffers beside the parameters and take the new ones: y, bound = "
    "fd.bind(module, {**params, **buffers}).updated(x); or inside of a function y = "
    "torch.func.functional_call(module, (params, buffers), (x,)), which returns y, buffers. "
    "After module.eval() a batch norm writes to none."
)
"""What to do about a module that writes to its buffers."""


def write_error(writer: str, target: object = None) -> TraceError:
    """The error for a write, in place, to a tensor that the function closes over."""
    owner = None if target is None else _owner(target)
    if owner is not None:
        module, name = owner
        return TraceError(
            f"{type(module).__name__} writes to its own {name!r}, which the function closes over.",
            line=user_line() or "not known",
            op=writer,
            hint=AS_BUFFERS,
        )
    return TraceError(
        f"{writer} writes to a tensor that the function closes over.",
        hint="Pass the tensor as an argument and return its new value.",
    )


def _owner(tensor: object) -> tuple[torch.nn.Module, str] | None:
    """The outermost module at work that has this tensor, and the name that it has there."""
    owner: tuple[torch.nn.Module, str] | None = None
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            own = [name for name, t in module.named_buffers() if t is tensor]
            owner = (module, own[0]) if own else owner
        frame = frame.f_back
    return owner
