"""Functions of NumPy on records: operators compute as Python's do, others take the full arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optree

__all__ = ["array_of", "reflected"]

_REFLECTED = {
    "add": "__radd__",
    "subtract": "__rsub__",
    "multiply": "__rmul__",
    "divide": "__rtruediv__",
    "floor_divide": "__rfloordiv__",
    "remainder": "__rmod__",
    "power": "__rpow__",
    "matmul": "__rmatmul__",
    "bitwise_and": "__rand__",
    "bitwise_or": "__ror__",
    "bitwise_xor": "__rxor__",
    "left_shift": "__rlshift__",
    "right_shift": "__rrshift__",
    "less": "__gt__",
    "less_equal": "__ge__",
    "greater": "__lt__",
    "greater_equal": "__le__",
    "equal": "__eq__",
    "not_equal": "__ne__",
}
"""The method of the right operand that stands for an operator of arrays."""


def reflected(ufunc: np.ufunc, method: str, args: Sequence[Any], options: Any) -> str | None:
    """The method of the second operand that computes a ufunc; None where it is no operator."""
    if method != "__call__" or options or len(args) != 2:
        return None
    return _REFLECTED.get(ufunc.__name__)


_OF_SHAPES = np.shape, np.ndim, np.size
"""Functions that need no values: one rank alone may call them."""


def array_of(function: Any, args: Any, kwargs: Mapping[str, Any], kind: type) -> Any:
    """What a function of NumPy gives for the full arrays of the records among its arguments."""

    def array(x: Any) -> Any:
        if not isinstance(x, kind):
            return x
        own: Any = x
        return np.broadcast_to(0, own.shape) if function in _OF_SHAPES else np.asarray(own)

    given: Any = args, dict(kwargs)
    arrays = optree.tree_map(array, given, is_leaf=lambda x: isinstance(x, kind))
    return function(*arrays[0], **arrays[1])
