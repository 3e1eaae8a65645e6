"""Distributed tensors that a traced function closes over, as arguments that it is given besides.

The function is recorded until it uses one that it was not given, and again with that one as an
argument, until it has all of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import optree
import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.tree import flatten, unflatten

__all__ = ["closing", "full_of", "given_all", "given_besides", "given_nothing"]

R = TypeVar("R")

_ARGUMENT = "closed over"
"""The name of the argument with what the function closes over."""


_SCOPE: ContextVar[Mapping[int, torch.Tensor] | None] = ContextVar("closed over", default=None)
"""The tensors for what the function that is recorded closes over: also where a step of a scan runs
again for a derivative, after that function has returned."""


class _ClosesOver(BaseException):  # no `except Exception` of the user stops it
    """Raised where a function uses a distributed tensor that it was not given."""

    def __init__(self, value: Any) -> None:
        self.value = value


def full_of(value: Any) -> torch.Tensor:
    """The full tensor that stands for a distributed one in the function that is recorded."""
    scope = _SCOPE.get()
    if scope is None:
        raise TraceError(
            f"a function of local tensors uses a DTensor, {value.type}, that it closes over.",
            line=user_line() or "not known",
            hint="Pass it as an argument.",
        )
    if id(value) not in scope:
        raise _ClosesOver(value)
    return scope[id(value)]


def given_all(trace: Callable[[tuple[Any, ...]], R], values: tuple[Any, ...] = ()) -> R:
    """The result of `trace`, which is given the values that its function closes over.

    `values` are those that are known from the start.
    """
    while True:
        try:
            with _scope({}):
                return trace(values)
        except _ClosesOver as unknown:
            if any(x is unknown.value for x in values):
                raise  # it would have no end
            values = (*values, unknown.value)


def closing(f: Callable[..., Any], values: Callable[[], Sequence[Any]]) -> Callable[..., Any]:
    """`f` with one more argument, the tensors that stand for the `values` that it closes over."""

    def closed(*args: Any, **kwargs: Any) -> Any:
        tensors = kwargs.pop(_ARGUMENT)
        with _scope({id(x): t for x, t in zip(values(), tensors, strict=True)}):
            return f(*args, **kwargs)

    return functools.update_wrapper(closed, f, updated=())


def given_besides(
    leaves: Sequence[Any],
    spec: optree.PyTreeSpec,
    values: Sequence[Any],
    is_leaf: Callable[[Any], bool],
) -> tuple[list[Any], optree.PyTreeSpec]:
    """The arguments for what `closing` gives: those for the function, and the values."""
    args, kwargs = unflatten(spec, leaves)
    return flatten((args, {**kwargs, _ARGUMENT: [*values]}), is_leaf=is_leaf)


def given_nothing() -> contextlib.AbstractContextManager[None]:
    """A context of a function of local tensors, which may close over no distributed one."""
    return _scope(None)


@contextlib.contextmanager
def _scope(tensors: Mapping[int, torch.Tensor] | None) -> Generator[None]:
    before = _SCOPE.set(tensors)
    try:
        yield
    finally:
        _SCOPE.reset(before)
