"""`opaque`: a function that `torch.compile` calls as it is: its graph ends there and goes on after.

Plans are made by Python that nobody wants compiled; what runs them is a handful of collectives.
Gradients flow through: autograd sees what the function does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["opaque"]

F = TypeVar("F", bound=Callable[..., Any])
_C: Any = eval_frame
_SKIP = _C._FrameExecStrategy(_C._FrameAction.SKIP, _C._FrameAction.SKIP)


def opaque(f: F) -> F:
    """The function, marked: neither it nor what it calls is compiled. A call costs nothing more."""
    f.__dict__["_torchdynamo_disable"] = True
    _C.set_code_exec_strategy(f.__code__, _SKIP)
    return f
