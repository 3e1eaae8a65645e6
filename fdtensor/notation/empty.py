"""`unless_empty`: what kernels that refuse empty blocks give for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["unless_empty"]


def unless_empty(op: Any, *dtypes: torch.dtype | None) -> Callable[..., Any]:
    """`op` on the blocks, but zeros where one of them is empty.

    `dtypes` are those of the outputs after the first; by default, that of the first argument. For
    ops whose outputs are then empty themselves, or sums of nothing.
    """

    def local(at, x, *args, **kwargs):
        if any(0 in block.shape for block in at.ins):
            kinds = (None, *dtypes, *[None] * len(at.outs))
            return [x.new_zeros(b.shape, dtype=kind or x.dtype) for b, kind in zip(at.outs, kinds)]
        made = op(x, *args, **kwargs)
        results = made if isinstance(made, (tuple, list)) else (made,)
        return [t for t in results if isinstance(t, torch.Tensor)]

    return local
