"""Private names of torch, and those without a promise, for sizes as symbols: 2.11 to 2.13."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import re
from typing import Any

import torch

__all__ = ["SYMBOLIC", "conditions_on_sizes", "size_environment", "size_symbol", "symbolic_size"]

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""The classes of numbers that are computed from sizes which are not known."""


def size_environment() -> Any:
    """What keeps the symbols of sizes, and what is asked of them: no size has one of its own."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # sympy takes a second to import

    return ShapeEnv(specialize_zero_one=False, duck_shape=False)


def size_symbol(environment: Any, name: str, size: int) -> Any:
    """A new symbol, as sympy has them, for a size that is this one where the program asks."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    how = {"dynamic_dim": DimDynamic.DYNAMIC, "do_not_specialize_zero_one": True}
    return environment.create_symbol(size, ConstantSource(name), **how)


def symbolic_size(environment: Any, expression: Any, size: int) -> Any:
    """The size that an expression of symbols stands for, as a function that is recorded sees it."""
    return environment.create_symintnode(expression, hint=size)


def conditions_on_sizes(environment: Any) -> list[tuple[Any, str]]:
    """What a recording has relied on, as expressions, each with the line that asked for it."""
    return [(guard.expr, _place(str(guard.sloc))) for guard in environment.guards]


def _place(text: str) -> str:
    """`f.py:4` of what torch says of a line, which has parts of a folder and a function too."""
    line = re.search(r"([^\s/(]+):(\d+)", text)
    # files of the cells of a notebook have numbers for names
    return re.sub(r"^\d+\.py", "cell", line[0]) if line else "not known"
