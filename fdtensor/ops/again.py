"""`given_within`: what runs again for a derivative, after the call that gave it has returned.

Checkpoints and scans run parts of a function again. Parameters that `functional_call` put into a
module are out of it by then, so those parts run within the surroundings that they were given in.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import TraceError

__all__ = ["as_given", "given_within", "recomputed", "refuse_other_parameter"]

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From a function to one that runs it within surroundings."""

_AROUND: ContextVar[Around | None] = ContextVar("around what runs again", default=None)

_AGAIN: ContextVar[bool] = ContextVar("computed again", default=False)


@contextlib.contextmanager
def given_within(around: Around) -> Iterator[None]:
    """A context in which functions are given that are to run again within these surroundings."""
    outer = _AROUND.get()
    token = _AROUND.set(around if outer is None else lambda f: outer(around(f)))
    try:
        yield
    finally:
        _AROUND.reset(token)


def as_given(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs, whenever it does, within the surroundings of this call."""
    around = _AROUND.get()
    return f if around is None else around(f)


def recomputed(f: Callable[..., Any]) -> Callable[..., Any]:
    """What a checkpoint computes again in place of a function; it may read no other parameter."""
    f = as_given(f)

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _AGAIN.set(True)
        try:
            return f(*args, **kwargs)
        finally:
            _AGAIN.reset(token)

    return run


def refuse_other_parameter(tensor: torch.Tensor) -> None:
    """Raises `TraceError` where what is computed again reads a parameter for the first time."""
    if _AGAIN.get() and isinstance(tensor, torch.nn.Parameter):
        raise TraceError(
            "a checkpoint that is computed again for a derivative reads a parameter that it did "
            "not read before.",
            parameter=f"{tuple(tensor.shape)} {tensor.dtype}",
            line=user_line() or "not known",
            hint="torch.func.functional_call had put another one there, and is over by then: have "
            "the module bound by fdtensor.bind, or call functional_call inside of the checkpoint.",
        )
