"""The wire: what stands in for a dtype where a backend lacks it, and for its reductions.

A stand-in has the same bits and the same shape, so it costs nothing: complex numbers travel as
pairs of reals, other dtypes as one that every backend moves. Where the largest or smallest of
floats is asked for, integers in the same order travel, with NaN beyond infinity: backends drop NaN,
which torch keeps.
"""

from __future__ import annotations

import torch

from fdtensor.layouts.placement import ReduceOp

__all__ = ["flipped", "from_wire", "in_order", "reduces_as", "to_wire"]

_MOVED = {
    torch.uint8, torch.int8, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
"""The dtypes that gloo and NCCL both move as they are."""

_BY_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}

_IN_ORDER = {torch.float32: torch.int32, torch.float64: torch.int64}
"""The floats whose order integers of a dtype that gloo and NCCL reduce can have."""

_NANS = {torch.float32: 2**23 - 1, torch.float64: 2**52 - 1}
"""How many NaN of one sign there are: all but infinity with the largest exponent."""

_BITS: frozenset[ReduceOp] = frozenset({"band", "bor", "bxor"})


def to_wire(tensor: torch.Tensor, reduce_op: ReduceOp | None = None) -> torch.Tensor:
    """A contiguous tensor as one that every backend moves and reduces.

    It is a view, but for keys of what is `in_order`; complex ones gain a last dim.
    """
    if in_order(tensor.dtype, reduce_op):
        return _to_keys(tensor, reduce_op)
    if tensor.dtype in _MOVED:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(_BY_SIZE[tensor.itemsize])


def from_wire(
    wire: torch.Tensor, dtype: torch.dtype, reduce_op: ReduceOp | None = None
) -> torch.Tensor:
    """The tensor of `dtype` that has travelled: the inverse of `to_wire`. Overwrites keys."""
    if in_order(dtype, reduce_op):
        return _from_keys(wire, dtype, reduce_op)
    if wire.dtype == dtype:
        return wire
    return torch.view_as_complex(wire) if dtype.is_complex else wire.view(dtype)


def in_order(dtype: torch.dtype, reduce_op: ReduceOp | None) -> bool:
    """Whether keys travel: integers in the order of the floats."""
    return reduce_op in ("max", "min") and dtype in _IN_ORDER


def _to_keys(floats: torch.Tensor, reduce_op: ReduceOp | None) -> torch.Tensor:
    """Integers in the order of the floats, -0.0 below 0.0; every NaN is what `reduce_op` keeps."""
    bits = floats.view(_IN_ORDER[floats.dtype])
    return flipped(bits).add_(_turn(floats.dtype, reduce_op))


def _from_keys(keys: torch.Tensor, dtype: torch.dtype, reduce_op: ReduceOp | None) -> torch.Tensor:
    """The floats that keys stand for."""
    return flipped(keys.sub_(_turn(dtype, reduce_op))).view(dtype)


def flipped(bits: torch.Tensor) -> torch.Tensor:
    """The bits of floats as new integers in their order, and back.

    Where the sign is set all other bits are flipped.
    """
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> info.bits - 1) & info.max)


def _turn(dtype: torch.dtype, reduce_op: ReduceOp | None) -> int:
    """What is added to integers to take NaN of one sign, past their end, to those of the other."""
    count = _NANS[dtype]
    return -count if reduce_op == "max" else count


def reduces_as(dtype: torch.dtype, reduce_op: ReduceOp, backend: str) -> str | None:
    """The reduction of stand-ins that gives `reduce_op` of the dtype, or None where none does.

    An average is a sum, to be divided; of floats `in_order` the integers are reduced. Without one:
    max and min of other floats, whose NaN gloo and NCCL drop where torch keeps it; 16-bit integers;
    products of complex numbers; bits on NCCL.
    """
    if dtype == torch.bool:
        as_max: dict[ReduceOp, str] = {
            "sum": "max", "max": "max", "bor": "max",
            "product": "min", "min": "min", "band": "min",
        }  # fmt: skip
        return as_max.get(reduce_op, "bxor" if backend == "gloo" else None)
    if reduce_op in ("max", "min") and dtype.is_floating_point and not in_order(dtype, reduce_op):
        return None
    if reduce_op in _BITS and backend != "gloo":
        return None
    if dtype.is_complex:
        return "sum" if reduce_op in ("sum", "avg") else None
    if dtype.itemsize == 2 and not dtype.is_floating_point:
        return None
    return "sum" if reduce_op == "avg" else reduce_op
