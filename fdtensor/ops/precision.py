"""The dtype in which pending sums are held: half precision would lose digits, or overflow.

Torch's kernels add numbers of half precision up in float32, and round once. The terms that ranks
hold are treated in the same way: a line that gives pending terms of a half dtype computes them in
float32, they are reduced in float32, and the result is rounded.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Partial
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import packet_name, schema_of
from fdtensor.ops.own_ops import own_op

__all__ = [
    "CAST",
    "HALVES",
    "ROUNDED",
    "WIDE",
    "has_pending_sum",
    "is_sum",
    "is_widened",
    "wide_of",
    "widened",
    "widened_type",
]

aten = torch.ops.aten

HALVES = (torch.float16, torch.bfloat16, torch.complex32)
"""Dtypes whose pending sums are held in a wider one."""

CAST = aten._to_copy.default


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, copy=True)


ROUNDED = own_op("rounded(Tensor x, ScalarType dtype) -> Tensor", _rounded)
"""The cast of each term of a sum that stays pending: for outputs that are pending and half."""

WIDE = {aten.mm.default: aten.mm.dtype, aten.bmm.default: aten.bmm.dtype}
"""Ops with an overload that reads half operands and gives float32."""


def is_sum(placement: object) -> bool:
    """Whether ranks hold terms of a sum or of an average along an axis."""
    return isinstance(placement, Partial) and placement.reduce_op in ("sum", "avg")


def has_pending_sum(layout: Layout) -> bool:
    """Whether a layout leaves a sum or an average of several ranks pending."""
    along = zip(layout.placements, layout.mesh.sizes, strict=True)
    return any(is_sum(p) and size > 1 for p, size in along)


def widened_type(type: TensorType, reduce_dtype: torch.dtype | None) -> TensorType:
    """The type in which a value of this type is held: of a wider dtype while a sum is pending."""
    if reduce_dtype is None or type.dtype not in HALVES or not has_pending_sum(type.layout):
        return type
    return attrs.evolve(type, dtype=wide_of(type.dtype, reduce_dtype))


def wide_of(dtype: torch.dtype, reduce_dtype: torch.dtype) -> torch.dtype:
    """The dtype of pending sums of a half: complex numbers have two parts of `reduce_dtype`."""
    return reduce_dtype.to_complex() if dtype.is_complex else reduce_dtype


def is_widened(op: Any) -> bool:
    """Whether a line of this op may run on wider operands: not ops of other libraries."""
    return op.namespace in ("aten", "fdtensor")


def widened(op: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any, Any, bool]:
    """The op and arguments that give `dtype`, and whether operands stay halves."""
    if op in WIDE and dtype is torch.float32:
        return WIDE[op], (*args, dtype), kwargs, True
    takes = any(a.name == "dtype" and a.kwarg_only for a in schema_of(op).arguments)
    if takes and packet_name(op) in ("sum", "mean", "nansum"):
        rest = tuple((name, value) for name, value in kwargs if name != "dtype")
        return op, args, (*rest, ("dtype", dtype)), True
    return op, _replaced(args, dtype), _replaced(kwargs, dtype), False


def _replaced(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, tuple):
        return tuple([_replaced(entry, dtype) for entry in tree])
    return wide_of(tree, dtype) if tree in HALVES else tree
