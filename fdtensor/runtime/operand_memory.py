"""`brought_by`: what brings operands into the memory that an op wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fdtensor.ops.rewrite import CROSS_ENTROPY_BACKWARD
from fdtensor.ops.rules.attention import BACKWARDS, SEEDS

__all__ = ["BY_HAND", "RESHAPES", "apart", "brought_by", "from_start", "in_rows", "strict_operands"]

aten = torch.ops.aten


def in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the elements of its last dim side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def from_start(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory that begins with it, with the very strides of its shape."""
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(1, size)
    # to be contiguous is not enough: a dim of one index may have any stride
    if tensor.storage_offset() or tensor.stride() != tuple(strides[::-1]):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with each element in a place of its own, which those of a window may not have."""
    reach = 1  # one place behind the last element of the dims so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return tensor.contiguous()
        reach += (size - 1) * stride
    return tensor


BY_HAND = (in_rows, from_start, apart)
"""The functions that lines call beside ops: the same values, in memory as an op wants them."""


CONTIGUOUS = {
    aten.nll_loss2d_backward.default: (0, 1, 2, 3, 4),
    CROSS_ENTROPY_BACKWARD: (0, 1, 2, 3),
    aten.native_group_norm.default: (0, 1, 2),
    aten.native_layer_norm_backward.default: (2, 3),
    aten.adaptive_max_pool3d_backward.default: (2,),
    aten._linalg_det.default: (0,),
    aten._linalg_slogdet.default: (0,),
    aten._linalg_solve_ex.default: (0,),
    aten._embedding_bag.default: (0, 1, 2, 3),
    aten._embedding_bag_forward_only.default: (0, 1, 2, 3),
    aten._embedding_bag_backward.default: (1, 2, 3),
    aten._embedding_bag_per_sample_weights_backward.default: (2, 3, 4),
    aten._pdist_forward.default: (0,),
    aten._pdist_backward.default: (1, 2),
}
"""Ops that refuse strided tensors, or read them wrongly, with which of their operands.

`python -m tests.operators --form any` looks for them.
"""

IN_ROWS = {
    **dict.fromkeys(SEEDS, (0, 1, 2)),
    **dict.fromkeys(BACKWARDS, (0, 1, 2, 3)),
}
"""Kernels that read rows as if their elements lay side by side: those of attention."""

CANONICAL = {
    aten.as_strided.default: (0,),
    aten.as_strided_copy.default: (0,),
    aten.as_strided_scatter.default: (0, 1),
    aten.view_as_complex.default: (0,),
    aten.view.dtype: (0,),
}
"""Ops about memory, which ask for the very strides and the offset that a new tensor has."""

WRITTEN = {
    aten.select_scatter.default: (0,),
    aten.slice_scatter.default: (0,),
    aten.diagonal_scatter.default: (0,),
}
"""Ops that write into a copy with the strides of an operand, of which two elements may be one."""

RESHAPES = {aten.view.default, aten._unsafe_view.default}
"""Views whose strides a block need not have."""


def strict_operands(op: Any) -> tuple[int, ...]:
    """The numbers of the operands whose memory an op has demands on."""
    return next(
        (operands[op] for operands in (CONTIGUOUS, IN_ROWS, CANONICAL, WRITTEN) if op in operands),
        (),
    )


def brought_by(op: Any) -> Callable[..., torch.Tensor]:
    """Returns the function that copies an operand into the memory that an op wants."""
    for ops, brought in ((IN_ROWS, in_rows), (CANONICAL, from_start), (WRITTEN, apart)):
        if op in ops:
            return brought
    return aten.contiguous.default
