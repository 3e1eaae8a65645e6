"""Functions of NumPy on records: operators compute as Python's do, others take the full arrays.

The arrays cannot be written to: what is written would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import optree

__all__ = ["array_of", "operator_of"]

_NAMES = {
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "truediv",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "power": "pow",
    "matmul": "matmul",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "left_shift": "lshift",
    "right_shift": "rshift",
}
"""The operators of arrays, each with its name in Python."""

_COMPARISONS = {
    "less": ("lt", "gt"),
    "less_equal": ("le", "ge"),
    "greater": ("gt", "lt"),
    "greater_equal": ("ge", "le"),
    "equal": ("eq", "eq"),
    "not_equal": ("ne", "ne"),
}

_METHODS = {name: (own, f"r{own}") for name, own in _NAMES.items()} | _COMPARISONS


def operator_of(ufunc: np.ufunc, x: Any, y: Any, kind: type) -> Any:
    """What an operator gives for two values, one of them a record; or `NotImplemented`."""
    if ufunc.__name__ not in _METHODS:
        return NotImplemented
    own, reflected = _METHODS[ufunc.__name__]
    if isinstance(x, kind):
        return getattr(x, f"__{own}__")(y)
    return getattr(y, f"__{reflected}__")(x)


_OF_SHAPES = np.shape, np.ndim, np.size
"""Functions that need no values: one rank alone may call them."""


def array_of(function: Any, args: Any, kwargs: Mapping[str, Any], kind: type) -> Any:
    """What a function of NumPy gives for the full arrays of the records among its arguments."""

    def array(x: Any) -> Any:
        if not isinstance(x, kind):
            return x
        own: Any = x
        read_only = np.broadcast_to(0, own.shape) if function in _OF_SHAPES else np.asarray(own)
        read_only.flags.writeable = False
        return read_only

    given: Any = args, dict(kwargs)
    arrays = optree.tree_map(array, given, is_leaf=lambda x: isinstance(x, kind))
    return function(*arrays[0], **arrays[1])
