"""Reductions of terms: adding one to a total in place, identity elements, averages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import assert_never

from fdtensor.layouts.placement import ReduceOp
from fdtensor.plans.local_tensors import copied

__all__ = ["REPEATABLE", "accumulate", "divide", "identity", "reduced"]

REPEATABLE: frozenset[ReduceOp] = frozenset({"avg", "max", "min", "band", "bor"})
"""The reduce ops that give back a value which every rank holds as its term."""

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def accumulate(reduce_op: ReduceOp, total: torch.Tensor, term: torch.Tensor) -> None:
    """Reduces `term` into `total`, in place; an average adds and is divided at the end."""
    match reduce_op:
        case "sum" | "avg":
            signed = _SIGNED.get(total.dtype)
            if signed is None:
                total.add_(term)
            else:  # torch does not add these; the bits of the sum are the same
                total.view(signed).add_(term.view(signed))
        case "product":
            total.mul_(term)
        case "max":
            torch.maximum(total, term, out=total)
        case "min":
            torch.minimum(total, term, out=total)
        case "band":
            total.bitwise_and_(term)
        case "bor":
            total.bitwise_or_(term)
        case "bxor":
            total.bitwise_xor_(term)
        case _:
            assert_never(reduce_op)


def divide(total: torch.Tensor, count: int) -> torch.Tensor:
    """Divides in place what was added up, and returns it."""
    if total.dtype == torch.complex32:  # torch does not divide these on the CPU
        torch.view_as_real(total).div_(count)
        return total
    return total.div_(count)


def identity(reduce_op: ReduceOp, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """A tensor of elements that change nothing when reduced."""
    dtype = like.dtype
    filled = torch.empty(shape, dtype=dtype, device=like.device)
    real = dtype.is_floating_point or dtype.is_complex
    match reduce_op:
        case "sum" | "avg":
            # -0.0 + x is x for every x, 0.0 + -0.0 is not
            return filled.fill_(complex(-0.0, -0.0) if dtype.is_complex else -0.0 if real else 0)
        case "product":
            return filled.fill_(1)
        case "max" | "min":
            if real:
                return filled.fill_(float("-inf") if reduce_op == "max" else float("inf"))
            if dtype == torch.bool:
                return filled.fill_(reduce_op == "min")
            info = torch.iinfo(dtype)
            return filled.fill_(info.min if reduce_op == "max" else info.max)
        case "band":
            if dtype == torch.bool:
                return filled.fill_(True)
            return _ones(filled)
        case "bor" | "bxor":
            return filled.fill_(0)
        case _:
            assert_never(reduce_op)


def _ones(filled: torch.Tensor) -> torch.Tensor:
    """Every bit set."""
    signed = _SIGNED.get(filled.dtype)
    if signed is not None:
        filled.view(signed).fill_(-1)
    else:
        filled.fill_(255 if filled.dtype == torch.uint8 else -1)
    return filled


def reduced(terms: Sequence[torch.Tensor], reduce_op: ReduceOp) -> torch.Tensor:
    """The reduction of terms, in their order; a fresh tensor."""
    total = copied(terms[0])
    for term in terms[1:]:
        accumulate(reduce_op, total, term)
    return divide(total, len(terms)) if reduce_op == "avg" else total
