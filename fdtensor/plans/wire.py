"""The wire: what stands in for a dtype where a backend lacks it, and for its reductions.

A stand-in has the same bits and the same shape, so it costs nothing: complex numbers travel as
pairs of reals, other dtypes as one that every backend moves.
"""

from __future__ import annotations

import torch

from fdtensor.layouts.placement import ReduceOp

__all__ = ["from_wire", "reduces_as", "to_wire"]

_MOVED = {
    torch.uint8, torch.int8, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
"""The dtypes that gloo and NCCL both move as they are."""

_BY_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}

_BITS: frozenset[ReduceOp] = frozenset({"band", "bor", "bxor"})


def to_wire(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one that every backend moves, a view; complex ones gain a last dim."""
    if tensor.dtype in _MOVED:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(_BY_SIZE[tensor.itemsize])


def from_wire(wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of `dtype` that has travelled: the inverse of `to_wire`."""
    if wire.dtype == dtype:
        return wire
    return torch.view_as_complex(wire) if dtype.is_complex else wire.view(dtype)


def reduces_as(dtype: torch.dtype, reduce_op: ReduceOp, backend: str) -> str | None:
    """The reduction of stand-ins that gives `reduce_op` of the dtype, or None where none does.

    An average is a sum, to be divided. Without one: max and min of floats, whose NaN gloo and NCCL
    drop where torch keeps it; 16-bit integers; products of complex numbers; bits on NCCL.
    """
    if dtype == torch.bool:
        as_max: dict[ReduceOp, str] = {
            "sum": "max", "max": "max", "bor": "max",
            "product": "min", "min": "min", "band": "min",
        }  # fmt: skip
        return as_max.get(reduce_op, "bxor" if backend == "gloo" else None)
    if reduce_op in ("max", "min") and dtype.is_floating_point:
        return None
    if reduce_op in _BITS and backend != "gloo":
        return None
    if dtype.is_complex:
        return "sum" if reduce_op in ("sum", "avg") else None
    if dtype.itemsize == 2 and not dtype.is_floating_point:
        return None
    return "sum" if reduce_op == "avg" else reduce_op
