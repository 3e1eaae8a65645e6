"""Local computations for ops whose kernels refuse empty blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fdtensor.ops.graph import tensors_of

__all__ = ["never_empty", "or_nothing", "unless_empty"]


def unless_empty(op: Any, *dtypes: torch.dtype | None) -> Callable[..., Any]:
    """`op` on the blocks, but zeros where one of them is empty.

    `dtypes` are those of the outputs after the first; by default, that of the first argument. For
    ops whose outputs are then empty too, or sums of no elements.
    """

    def local(at, x, *args, **kwargs):
        if any(0 in block.shape for block in at.ins):
            kinds = (None, *dtypes, *[None] * len(at.outs))[: len(at.outs)]
            return [
                x.new_zeros(b.shape, dtype=kind or x.dtype)
                for b, kind in zip(at.outs, kinds, strict=True)
            ]
        out = op(x, *args, **kwargs)
        results = out if isinstance(out, (tuple, list)) else (out,)
        return [t for t in results if isinstance(t, torch.Tensor)]

    return local


def never_empty(op: Any) -> Any:
    """`op`, run on a zero in place of an empty block, whose results are then dropped."""

    def local(at, *args):
        def filled(t):
            if isinstance(t, (list, tuple)):  # a shape that is an argument beside the tensor
                return [max(1, n) if type(n) is int else n for n in t]
            if not isinstance(t, torch.Tensor) or t.numel() or not t.is_floating_point():
                return t
            return t.new_zeros([max(1, n) for n in t.shape])

        results = tensors_of(op(*map(filled, args)))
        return [
            t if t.shape == b.shape or 0 not in b.shape else t.new_zeros(b.shape)
            for t, b in zip(results, at.outs, strict=True)
        ]

    return local


def or_nothing(op: Any) -> Callable[..., Any]:
    """`op` on the blocks, which is not run for an output without elements."""

    def local(at, x, *args, **kwargs):
        shape = at.outs[0].shape
        return x.new_zeros(shape) if 0 in shape else op(x, *args, **kwargs)

    return local
