"""What a rank does with its own tensors: cut blocks out, put them in place, reduce terms.

No communication here. Messages are contiguous tensors in the shape of their box; a 0-d tensor is
handled as one element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

import torch
from typing_extensions import assert_never

from fdtensor.blocks import Box, intersect, locate
from fdtensor.collective import Mask, Pad, Scale, Slice, Step
from fdtensor.exchange import Message, Route
from fdtensor.layout import TensorType
from fdtensor.placement import ReduceOp
from fdtensor.transition import REPEATABLE

__all__ = [
    "accumulate",
    "block",
    "empty",
    "identity",
    "join",
    "keep",
    "local_step",
    "pack",
    "pack_into",
    "settle",
    "split",
]

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def views(tensor: torch.Tensor, box: Box) -> Iterator[torch.Tensor]:
    """The rectangles that a box of positions selects, the last dim fastest."""
    for corner in product(*box):
        part = tensor
        for dim, (start, stop) in enumerate(corner):
            if stop - start != part.shape[dim]:
                part = part.narrow(dim, start, stop - start)
        yield part


def block(tensor: torch.Tensor, box: Box) -> torch.Tensor | None:
    """The box as a view, or None where it is not one rectangle."""
    if all(len(held) == 1 for held in box):
        return next(views(tensor, box))
    return None


def pack(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The box as a contiguous tensor; a view where it is one already."""
    view = block(tensor, box)
    if view is not None:
        return view.contiguous()
    packed = tensor.new_empty([sum(stop - start for start, stop in held) for held in box])
    pack_into(packed, tensor, box)
    return packed


def pack_into(packed: torch.Tensor, tensor: torch.Tensor, box: Box) -> None:
    """Copies the box into a contiguous tensor of as many elements."""
    shaped = packed.view([sum(stop - start for start, stop in held) for held in box])
    keep(box, tensor, _runs(box), shaped)


def _runs(box: Box) -> Box:
    """The box as positions in the packed tensor: the same runs, one after the other."""
    packed = []
    for held in box:
        runs, start = [], 0
        for low, high in held:
            runs.append((start, start + high - low))
            start += high - low
        packed.append(tuple(runs))
    return tuple(packed)


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


def local_step(step: Step, rank: int, local: torch.Tensor) -> torch.Tensor:
    """What `rank` holds after a step that needs no traffic; never an alias of `local`."""
    src, dst, collective = step.src, step.dst, step.collective
    here, there = src.mesh.coord(rank), dst.mesh.coord(rank)
    if here is None or there is None:
        return local if here is there else empty(dst, rank, local)
    match collective:
        case Scale(axes, reduce_op):
            count = prod(src.mesh.axis_size(axis) for axis in axes)
            return local * count if reduce_op == "avg" else local / count
        case Mask(axes, reduce_op):
            first = all(there[dst.mesh.axis(axis)] == 0 for axis in axes)
            if first or reduce_op in REPEATABLE:
                return copied(local)
            return identity(reduce_op, local.shape, local)
        case Pad(_, _, reduce_op):
            out = identity(reduce_op, dst.local_shape(rank), local)
        case Slice():
            out = empty(dst, rank, local)
        case _:
            raise AssertionError(f"{collective} is not local")
    old, new = src.box(here), dst.box(there)
    both = tuple([intersect(a, b) for a, b in zip(old, new, strict=True)])
    if all(both):
        keep(tuple(map(locate, old, both)), local, tuple(map(locate, new, both)), out)
    return out


def copied(local: torch.Tensor) -> torch.Tensor:
    """A contiguous copy."""
    return local.clone(memory_format=torch.contiguous_format)


def keep(source: Box, local: torch.Tensor, target: Box, out: torch.Tensor) -> None:
    """Copies the boxes, interval by interval, from `local` to `out`."""
    for there, here in zip(views(out, target), views(local, source), strict=True):
        there.copy_(here)


# --- exchanges -------------------------------------------------------------------------------


def settle(
    here: Route,
    reduce_op: ReduceOp | None,
    local: torch.Tensor,
    out: torch.Tensor,
    arrived: Mapping[int, torch.Tensor],
    recvs: Sequence[Message],
    with_kept: bool = True,
) -> None:
    """Puts what a rank keeps and what has arrived into `out`, terms in their order.

    A message that was received in its place in `out` is not in `arrived`.
    """
    kept = here.kept if with_kept else None
    kept_term = kept[1].term if kept else -1
    if kept and kept_term == 0:
        keep(kept[0].box, local, kept[1].box, out)
        kept = None
    for message in recvs:
        if kept and kept_term <= message.term:
            _add_kept(kept, reduce_op, local, out)
            kept = None
        term = arrived.get(message.peer)
        if term is not None:
            _place(message, reduce_op, term, out)
    if kept:
        _add_kept(kept, reduce_op, local, out)


def _add_kept(
    kept: tuple[Message, Message],
    reduce_op: ReduceOp | None,
    local: torch.Tensor,
    out: torch.Tensor,
) -> None:
    assert reduce_op is not None
    for total, term in zip(views(out, kept[1].box), views(local, kept[0].box), strict=True):
        accumulate(reduce_op, total, term)


def _place(
    message: Message, reduce_op: ReduceOp | None, term: torch.Tensor, out: torch.Tensor
) -> None:
    parts = views(term, _runs(message.box))
    for target, part in zip(views(out, message.box), parts, strict=True):
        if message.term == 0:
            target.copy_(part)
        else:
            assert reduce_op is not None
            accumulate(reduce_op, target, part)


# --- even blocks -----------------------------------------------------------------------------


def split(
    tensor: torch.Tensor,
    counts: Sequence[int],
    dims: Sequence[int],
    stack: Sequence[int] | None = None,
) -> torch.Tensor:
    """The even blocks that cuts of `dims[i]` into `counts[i]` make, stacked: shape (k, *block).

    Cuts of one dim are from outer to inner. Blocks are stacked with the last cut fastest, or in the
    order of the cuts that `stack` lists. A view where it can be.
    """
    shape, order = _cut_shape(tensor.shape, counts, dims, stack)
    cut = tensor.reshape(shape).permute(order)
    return cut.reshape(prod(counts), *cut.shape[len(counts) :])


def join(
    blocks: torch.Tensor,
    counts: Sequence[int],
    dims: Sequence[int],
    stack: Sequence[int] | None = None,
) -> torch.Tensor:
    """The tensor whose even blocks are stacked in `blocks`: the inverse of `split`."""
    full = list(blocks.shape[1:])
    for count, d in zip(counts, dims, strict=True):
        full[d] *= count
    shape, order = _cut_shape(full, counts, dims, stack)
    inverse = [order.index(i) for i in range(len(order))]
    return blocks.reshape([shape[i] for i in order]).permute(inverse).reshape(full)


def _cut_shape(
    full: Sequence[int], counts: Sequence[int], dims: Sequence[int], stack: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """The shape with a dim for each cut, and the permutation that puts those first."""
    shape: list[int] = []
    cuts: list[int] = [0] * len(counts)
    rest: list[int] = []
    for d, size in enumerate(full):
        for i, (count, dim) in enumerate(zip(counts, dims, strict=True)):
            if dim == d:
                cuts[i] = len(shape)
                shape.append(count)
                size //= count
        rest.append(len(shape))
        shape.append(size)
    return shape, [cuts[i] for i in (range(len(cuts)) if stack is None else stack)] + rest
