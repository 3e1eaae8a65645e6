"""What a rank does with its own tensors: local steps, reductions, and putting in what arrives.

No communication here. A 0-d tensor is handled as one element.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from math import prod

import attrs
import torch
from typing_extensions import assert_never

from fdtensor.layouts.blocks import Box, intersect, locate
from fdtensor.layouts.placement import ReduceOp
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collective import Mask, Pad, Scale, Slice, Step
from fdtensor.plans.transitions import REPEATABLE
from fdtensor.runtime.packing import Cutting, Part, Round, Views, cut, cutting, pack_into

__all__ = [
    "accumulate",
    "copied",
    "divide",
    "empty",
    "flat",
    "identity",
    "keep",
    "local_step",
    "own",
    "packed",
    "plain",
    "settle",
]

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its bits as they are read: not a lazy conjugate or negative."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor


def own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own, which is copied when one of the two is written to."""
    if not torch._C._are_functorch_transforms_active():
        with contextlib.suppress(RuntimeError):  # memory of others, such as that of numpy arrays
            return torch._lazy_clone(tensor)  # type: ignore[attr-defined]
    return tensor.clone()


def copied(local: torch.Tensor) -> torch.Tensor:
    """A contiguous copy."""
    return local.clone(memory_format=torch.contiguous_format)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-d tensor as one element; others as they are."""
    return tensor if tensor.dim() else tensor.reshape(1)


def empty(type: TensorType, rank: int, like: torch.Tensor | torch.device) -> torch.Tensor:
    """A fresh tensor for what `rank` holds; for a rank outside, no elements (0-d: a zero)."""
    device = like if isinstance(like, torch.device) else like.device
    if type.mesh.coord(rank) is None:
        return torch.zeros((0,) * len(type.shape), dtype=type.dtype, device=device)
    return torch.empty(type.local_shape(rank), dtype=type.dtype, device=device)


# --- reductions ------------------------------------------------------------------------------


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


# --- local steps -----------------------------------------------------------------------------


@attrs.frozen(eq=False)
class _Here:
    """What a local step does on one rank."""

    both: bool
    """Whether the rank is in both meshes."""
    either: bool
    shape: tuple[int, ...]
    """That of its destination block."""
    common: tuple[Cutting, Cutting] | None
    """What it holds before and after, as a part of either block."""
    first: bool
    """Whether it keeps the value in a mask."""


@functools.lru_cache(maxsize=8192)
def _here(step: Step, rank: int) -> _Here:
    src, dst, collective = step.src, step.dst, step.collective
    here, there = src.mesh.coord(rank), dst.mesh.coord(rank)
    if here is None or there is None:
        return _Here(False, here is not None or there is not None, (), None, False)
    old, new = src.box(here), dst.box(there)
    both = tuple([intersect(a, b) for a, b in zip(old, new, strict=True)])
    shape = dst.local_shape(rank)
    common = None
    if all(both):
        olds: Box = tuple(map(locate, old, both))
        news: Box = tuple(map(locate, new, both))
        common = cutting([olds], src.local_shape(rank)), cutting([news], shape)
    first = not isinstance(collective, Mask) or all(
        there[dst.mesh.axis(axis)] == 0 for axis in collective.axes
    )
    return _Here(True, True, shape, common, first)


def local_step(step: Step, rank: int, local: torch.Tensor) -> torch.Tensor:
    """What `rank` holds after a step that needs no traffic; never an alias of `local`.

    A rank in neither mesh gets `local` back.
    """
    here, collective = _here(step, rank), step.collective
    if not here.both:
        return empty(step.dst, rank, local) if here.either else local
    match collective:
        case Scale(axes, reduce_op):
            count = prod(step.src.mesh.axis_size(axis) for axis in axes)
            scaled = local * count if reduce_op == "avg" else local / count
            return scaled.contiguous()  # what a step gives is, whatever it took
        case Mask(_, reduce_op):
            if here.first or reduce_op in REPEATABLE:
                return copied(local)
            return identity(reduce_op, here.shape, local)
        case Pad(_, _, reduce_op):
            out = identity(reduce_op, here.shape, local)
        case Slice():
            if here.common is not None and here.common[1].places == (((),),):  # the whole block
                return copied(cut(local, here.common[0])[0][0])
            out = local.new_empty(here.shape)
        case _:
            raise AssertionError(f"{collective} is not local")
    if here.common is not None:
        (olds,), (news,) = cut(local, here.common[0]), cut(out, here.common[1])
        for there, place in zip(olds, news, strict=True):
            place.copy_(there)
    return out


# --- exchanges -------------------------------------------------------------------------------


def packed(part: Part, rectangles: Views) -> torch.Tensor:
    """A part as a contiguous tensor; a view where it is one already."""
    if len(rectangles) == 1:
        return rectangles[0].contiguous()
    made = rectangles[0].new_empty(part.shape)
    pack_into(made, part, rectangles)
    return made


def keep(now: Round, olds: Sequence[Views], news: Sequence[Views]) -> None:
    """Copies what a rank keeps into its new block, unless other terms come before it."""
    if now.kept_term == 0:
        for old, new in now.kept:
            for there, here in zip(olds[old], news[new], strict=True):
                here.copy_(there)


def settle(
    now: Round,
    reduce_op: ReduceOp | None,
    olds: Sequence[Views],
    news: Sequence[Views],
    arrived: Iterable[torch.Tensor],
) -> None:
    """Puts what arrives into the new block, and what is kept there, terms in their order.

    `arrived` are the parcels in the order of `now.recvs`, packed; those in place are there already.
    So is, by `keep`, what is kept as first term.
    """
    waiting = now.kept_term > 0
    for parcel, term in zip(now.recvs, arrived, strict=True):
        if waiting and now.kept_term < parcel.term:
            _add_kept(now, reduce_op, olds, news)
            waiting = False
        if parcel.in_place:
            continue
        for run, place in zip(parcel.part.runs, news[parcel.index], strict=True):
            found = term[run] if run else term
            if parcel.term == 0:
                place.copy_(found)
            else:
                assert reduce_op is not None
                accumulate(reduce_op, place, found)
    if waiting:
        _add_kept(now, reduce_op, olds, news)


def _add_kept(
    now: Round, reduce_op: ReduceOp | None, olds: Sequence[Views], news: Sequence[Views]
) -> None:
    assert reduce_op is not None
    for old, new in now.kept:
        for there, here in zip(olds[old], news[new], strict=True):
            accumulate(reduce_op, here, there)
