"""`Numbers`: tensors where the optimizers of torch have Python numbers.

A learning rate that changes from step to step, and what follows from the count of steps, would be
constants of a program, which would be traced anew for each. As 0-d tensors they are inputs of it.
They have dtype float64, that of Python's floats, so that what is computed of them is the same.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Numbers", "greatest", "least"]

_ARITHMETIC = {"add", "sub", "mul", "div", "pow", "lerp", "addcmul", "addcdiv"}

_METHODS: Any = torch.Tensor


class Numbers(TorchFunctionMode):
    """Lets 0-d float64 tensors stand for Python numbers; those in `given` are not 0."""

    def __init__(self, nonzero: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.given = nonzero

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "item":
            return args[0].double()
        if name in _AGAINST_ZERO and args[1] == 0 and any(args[0] is t for t in self.given):
            return _AGAINST_ZERO[name]
        plain = name.removesuffix("_")
        if plain not in _ARITHMETIC:
            return func(*args, **kwargs)
        operands = [*args, *kwargs.values()]
        numbers = [x for x in operands if _is_number(x)]
        others = [x for x in operands if isinstance(x, torch.Tensor) and not _is_number(x)]
        if not numbers or not others or not all(map(_is_half, others)):
            return _scaled(func, plain, args, kwargs)
        # as kernels do with Python numbers: in float32, and rounded once
        wide, by = [_wide(x) for x in args], {k: _wide(x) for k, x in kwargs.items()}
        out = _scaled(getattr(_METHODS, plain), plain, wide, by)
        return args[0].copy_(out) if plain != name else out.to(others[0].dtype)


_AGAINST_ZERO = {"ne": True, "__ne__": True, "eq": False, "__eq__": False, "gt": True, "lt": False}
"""The results of comparing a number above 0 with 0."""


def _scaled(func: Any, plain: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call without tensors in the places where torch takes Python numbers only."""
    x = args[0]
    if plain == "lerp":
        weight = kwargs.get("weight", args[-1])
        if isinstance(weight, torch.Tensor) and weight.dtype != x.dtype:
            return func(x, args[1], weight.to(x.dtype))
        return func(*args, **kwargs)
    key = "alpha" if plain in ("add", "sub") else "value"
    by = kwargs.get(key)
    if not isinstance(by, torch.Tensor):
        return func(*args, **kwargs)
    by = by.to(x.dtype)
    if plain in ("addcmul", "addcdiv"):
        return func(x, args[1] * by, args[2])
    inplace = func.__name__.endswith("_")
    return getattr(_METHODS, "addcmul_" if inplace else "addcmul")(
        x, args[1], -by if plain == "sub" else by
    )


def _is_number(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim == 0 and x.dtype == torch.float64


def _is_half(x: Any) -> bool:
    return x.is_floating_point() and x.dtype.itemsize < 4


def _wide(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) else x


def least(*values: Any) -> Any:
    """Python's `min`, also of a number and a tensor that stands for one."""
    return _extreme(builtins.min, torch.minimum, "max", values)


def greatest(*values: Any) -> Any:
    """Python's `max`, also of a number and a tensor that stands for one."""
    return _extreme(builtins.max, torch.maximum, "min", values)


def _extreme(
    python: Callable[..., Any], of_two: Callable[..., Any], bound: str, values: Sequence[Any]
) -> Any:
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    numbers = [x for x in values if not isinstance(x, torch.Tensor)]
    if not tensors:
        return python(*values)
    extreme = tensors[0]
    for other in tensors[1:]:
        extreme = of_two(extreme, other)
    return extreme.clamp(**{bound: python(numbers)}) if numbers else extreme
