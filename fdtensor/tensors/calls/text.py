"""`shown`: a function of DTensors, as errors show it, and errors of one without a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fdtensor.layouts.errors import DataDependentError, TraceError

__all__ = ["no_backward", "no_program", "shown"]


def shown(f: Callable[..., Any], eager: bool = False) -> str:
    """The text of the function of DTensors that is made of `f`: `spmd('loss')`, `call('mul')`."""
    return f"{'call' if eager else 'spmd'}({getattr(f, '__name__', f)!r})"


def no_program(f: object) -> DataDependentError:
    """The error where a function runs on replicated operands, and so has no program."""
    return DataDependentError(
        f"{f!r} has no program: what it gives depends on the values of tensors.",
        hint="A call runs it on replicated operands.",
    )


def no_backward(f: object) -> TraceError:
    """The error where no argument of a call requires grad."""
    return TraceError(
        f"a call of {f!r} with these arguments has no backward.",
        hint="Give DTensors of which one requires grad: x.requires_grad_(). Types have no "
        "backward: trace torch.func.grad(f).",
    )
