"""`decomposition_of`: an op as simpler ones, for layouts in which its kernel would need all blocks.

A decomposition takes the arguments of the op and full tensors, so that the numbers of elements in
it are full ones, and returns what the op returns. Means are subtracted before squaring and maxima
before `exp`; what has fewer than 32 bits is computed in 32.

A *blocked* one is told over how many ranks a dim is cut. It reshapes the dim to `(blocks, size)`,
works along `size`, which needs no other rank, and puts together what each block leaves: a scan,
the candidates for the largest elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

__all__ = [
    "DECOMPOSITIONS",
    "Decomposition",
    "decomposition",
    "decomposition_of",
    "smooth",
    "summed",
    "wide",
]


@attrs.frozen(eq=False)
class Decomposition:
    """What an op does, in simpler ops."""

    f: Callable[..., Any]
    blocked: bool = False
    """Whether `f` takes the number of blocks that a dim is cut into, before the arguments."""


DECOMPOSITIONS: dict[torch._ops.OpOverload, Decomposition] = {}
"""By op."""


def decomposition(
    *ops: torch._ops.OpOverload, blocked: bool = False
) -> Callable[[Callable], Callable]:
    """Registers the decorated function as what the ops do."""

    def register(f: Callable) -> Callable:
        DECOMPOSITIONS.update(dict.fromkeys(ops, Decomposition(f, blocked)))
        return f

    return register


def decomposition_of(op: Any) -> Decomposition | None:
    """What `op` does, in simpler ops: as written here, else as torch has it; None where nobody has.

    A function of the arguments of the op that returns what the op returns: a tuple for several.
    """
    found = DECOMPOSITIONS.get(op)
    if found is None and op in _torch_decompositions():
        return Decomposition(_torch_decompositions()[op])
    return found


@functools.cache
def _torch_decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import decomposition_table

    return decomposition_table


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that sums are computed in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def smooth(x: torch.Tensor, name: str) -> torch.Tensor:
    """`x`; raises what torch's kernels raise for integers, which the simpler ops would round to."""
    if not (x.is_floating_point() or x.is_complex()):
        raise NotImplementedError(f"{name} not implemented for {x.dtype}")
    return x


def summed(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The sum over `dims`, which stay as dims of size 1; `x` itself where there are none."""
    return x.sum(tuple(dims), keepdim=True) if dims else x
