"""`opaque`: a function that `torch.compile` calls as it is: its graph ends there and goes on after.

Plans are made by Python that nobody wants compiled; what runs them is a handful of collectives.
Gradients flow through: autograd sees what the function does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fdtensor.layouts.torch_private import make_uncompiled

__all__ = ["opaque"]

F = TypeVar("F", bound=Callable[..., Any])


def opaque(f: F) -> F:
    """The function, marked: neither it nor what it calls is compiled. A call costs nothing more."""
    make_uncompiled(f)
    return f
