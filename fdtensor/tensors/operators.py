"""The operators and methods of a record that computes as a tensor of torch does: each by `call`."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any, TypeVar

import numpy as np
import torch

from fdtensor.tensors.refusals import OF_OTHERS, Absent, lacked, refuse_augmented

__all__ = ["CALL", "computes", "fill"]

F = TypeVar("F", bound=Callable[..., Any])

CALL: list[Callable[..., Any]] = []
"""The function by which records compute."""


def computes(call: F) -> F:
    """A decorator: the function by which DTensors compute, from a file that knows them."""
    CALL[:] = [call]
    return call


_UNARY = {
    "neg": torch.neg,
    "pos": torch.positive,
    "abs": torch.abs,
    "invert": torch.bitwise_not,
}

_BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "pow": torch.pow,
    "matmul": torch.matmul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
}

_COMPARISONS = {name: getattr(torch, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}


def _operator(kind: type, function: Any, swapped: bool = False) -> Callable[..., Any]:
    operands = kind, torch.Tensor, Number

    def compute(x: Any, y: Any) -> Any:
        if isinstance(y, (np.ndarray, np.generic)):
            y = torch.as_tensor(y) if isinstance(y, np.ndarray) else y.item()
        if not isinstance(y, operands):
            return NotImplemented
        return CALL[0](function, y, x) if swapped else CALL[0](function, x, y)

    return compute


def _augmented(kind: type, function: Any) -> Callable[..., Any]:
    """What `x += y` calls: a new value, but for parameters, which torch would write to."""
    compute = _operator(kind, function)

    def assign(x: Any, y: Any) -> Any:
        if x.requires_grad:
            refuse_augmented(x)
        return compute(x, y)

    return assign


def _unary(function: Any) -> Callable[[Any], Any]:
    return lambda x: CALL[0](function, x)


def _method(name: str) -> Callable[..., Any]:
    function = getattr(torch.Tensor, name)

    def method(x: Any, *args: Any, **kwargs: Any) -> Any:
        return CALL[0](function, x, *args, **kwargs)

    method.__name__, method.__doc__ = name, f"`torch.Tensor.{name}` of the full tensor, by `call`."
    return method


def _attribute(name: str) -> property:
    def get(x: torch.Tensor) -> Any:
        return getattr(x, name)

    get.__name__ = name
    return property(lambda x: CALL[0](get, x), doc=f"`torch.Tensor.{name}`, by `call`.")


_ATTRIBUTES = ("T", "mT", "H", "mH", "real", "imag")
"""What a tensor has besides methods that is another tensor."""


def fill(kind: Any) -> None:
    """Gives a class the operators of Python, and what else tensors of torch have."""
    for name, function in {**_BINARY, **_COMPARISONS}.items():
        setattr(kind, f"__{name}__", _operator(kind, function))
    for name, function in _BINARY.items():
        setattr(kind, f"__r{name}__", _operator(kind, function, swapped=True))
        if hasattr(torch.Tensor, f"__i{name}__"):
            setattr(kind, f"__i{name}__", _augmented(kind, function))
    kind.__rtruediv__ = _operator(kind, torch.Tensor.__rtruediv__)  # by the reciprocal
    for name, function in _UNARY.items():
        setattr(kind, f"__{name}__", _unary(function))
    for name in (*dir(torch.Tensor), *OF_OTHERS):
        if name.startswith("_") or name in vars(kind):
            continue
        if name in _ATTRIBUTES:
            setattr(kind, name, _attribute(name))
        elif lacked(name) or not callable(getattr(torch.Tensor, name, None)):
            setattr(kind, name, Absent(name))
        else:
            setattr(kind, name, _method(name))
