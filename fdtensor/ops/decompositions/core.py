"""`decomposition_of`: an op in simpler ops, for layouts in which its kernel would need all blocks.

A decomposition takes the arguments of the op, with full tensors, so that all sizes in it are full
ones, and returns the results of the op. Means are subtracted before squaring and maxima before
`exp`; halves are computed in float32.

A *blocked* one takes the number of ranks over which a dim is cut. It reshapes the dim to
`(blocks, size)`, works along `size`, which needs no other rank, and combines the results of the
blocks: their totals for a scan, their candidates for the largest elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.torch_private import OpOverload, decomposition_table

__all__ = [
    "DECOMPOSITIONS",
    "Decomposition",
    "decomposition",
    "decomposition_of",
    "own_decomposition",
    "smooth",
    "summed",
    "wide",
]


@attrs.frozen(eq=False)
class Decomposition:
    """An op in simpler ops."""

    f: Callable[..., Any]
    blocked: bool = False
    """Whether `f` takes the number of blocks that a dim is cut into, before the arguments."""


DECOMPOSITIONS: dict[OpOverload | str, Decomposition] = {}
"""By op, or by the name of one that torch registers when it is first used."""


def decomposition(*ops: OpOverload | str, blocked: bool = False) -> Callable[[Callable], Callable]:
    """Registers the decorated function as the decomposition of the ops."""

    def register(f: Callable) -> Callable:
        DECOMPOSITIONS.update(dict.fromkeys(ops, Decomposition(f, blocked)))
        return f

    return register


def own_decomposition(op: Any) -> Decomposition | None:
    """The decomposition of `op` that is ours; None where there is none."""
    return DECOMPOSITIONS.get(op) or DECOMPOSITIONS.get(str(op))


def decomposition_of(op: Any) -> Decomposition | None:
    """The decomposition of `op`: ours, else that of torch; None where there is none.

    It returns a tuple where the op has several results.
    """
    known = own_decomposition(op)
    if known is None and op in decomposition_table():
        return Decomposition(decomposition_table()[op])
    return known


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype in which sums are computed."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def smooth(x: torch.Tensor, name: str) -> torch.Tensor:
    """`x`; raises for integers as torch's kernels do, where the simpler ops would round."""
    if not (x.is_floating_point() or x.is_complex()):
        raise NotImplementedError(f"{name} not implemented for {x.dtype}")
    return x


def summed(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The sum over `dims`, which stay as dims of size 1; `x` itself where there are none."""
    return x.sum(tuple(dims), keepdim=True) if dims else x
