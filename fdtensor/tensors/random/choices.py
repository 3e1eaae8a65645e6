"""`bernoulli`, `categorical`, `permutation` and `dropout`: draws that look at a tensor."""

from __future__ import annotations

from math import ceil, isnan, log
from typing import Any

import torch

from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.errors import FdtensorError, LayoutError
from fdtensor.layouts.record import integer, natural
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.random_bits import Places, filled, split, uniform_of
from fdtensor.ops.random_bits.floats import FLOATS, width_of
from fdtensor.ops.random_bits.keys import AnyKey, recorded, words_of
from fdtensor.ops.random_bits.rounding import rounded
from fdtensor.runtime.comm import Comm
from fdtensor.tensors.call import call
from fdtensor.tensors.calls.arguments import compare_key
from fdtensor.tensors.connect import distribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.random.keyed import keyed
from fdtensor.tensors.random.numbers import bits, gumbel
from fdtensor.tensors.random.target import (
    Device,
    Where,
    blockwise,
    checked_dtype,
    checked_shape,
    drawn,
)

__all__ = ["bernoulli", "categorical", "dropout", "permutation"]


@keyed
@named_arguments
def bernoulli(
    key: AnyKey,
    p: Any = 0.5,
    shape: Where | None = None,
    comm: Comm[Any] | None = None,
    *,
    device: Device = None,
) -> Any:
    """Bools that are True with probability `p`: a number, or a tensor or DTensor of them.

    The shape is by default that of `p`, or one to which `p` is broadcast. For a DTensor it is
    plain, and the result has the layout of `p`. What a DTensor has outside of [0, 1] counts as
    the nearer end.

    >>> fd.random.bernoulli(fd.random.key(0), 0.5, (4,))
    tensor([False, False,  True,  True])
    """
    if not isinstance(p, (torch.Tensor, DTensor)):
        _probability(p)
        shape, number = () if shape is None else shape, float(p)
        _broadcastable((), shape)
        checked_dtype(shape, None, torch.bool, (torch.bool,), "bernoulli")
        return drawn(key, shape, comm, lambda at, device: _mask(key, number, at, device), device)
    if p.dtype not in FLOATS:
        raise FdtensorError(
            f"{dtype_name(p.dtype)} cannot be probabilities.", hint="Pass floats from 0 to 1."
        )
    shape = tuple(p.shape) if shape is None else shape
    _broadcastable(tuple(p.shape), shape)
    if isinstance(p, DTensor):
        return _distributed_bools(key, p, shape, comm)
    checked_dtype(shape, None, torch.bool, (torch.bool,), "bernoulli")
    full = _probabilities(p.detach())
    size = shape.shape if isinstance(shape, TensorType) else checked_shape(shape)
    device = device or (None if isinstance(shape, TensorType) else p.device)

    def draw(places: Places, device: Device) -> torch.Tensor:
        return _below(key, places.block(full.expand(size)).to(device), places, device)

    return drawn(key, shape, comm, draw, device)


def _distributed_bools(
    key: AnyKey, p: DTensor[Any], shape: Where, comm: Comm[Any] | None
) -> DTensor[Any]:
    """Bools in the layout of their probabilities."""
    words_of(key)
    if isinstance(shape, TensorType) or comm is not None:
        raise FdtensorError(
            f"the result has the layout of p, {p.layout}.",
            hint="Pass a plain shape, and redistribute p or the result.",
        )
    compare_key(key, p.comm, [p.mesh], None, is_first=False)
    settled = _settled(p).detach()
    wide = checked_shape(shape)
    if wide != tuple(p.shape):
        settled = call(torch.broadcast_to, settled, wide)
    return blockwise(settled, lambda at, x: _below(key, x, at, x.device), torch.bool)


def _below(key: AnyKey, limit: torch.Tensor, places: Places, device: Device) -> torch.Tensor:
    """Whether the uniform numbers of some places are below a limit, which has their dtype."""
    dtype = limit.dtype
    return filled(key, places, dtype, width_of(dtype), uniform_of(dtype), device) < limit


@keyed
@named_arguments
def categorical(key: AnyKey, logits: Any, dim: int = -1) -> Any:
    """The index along `dim` of one of its categories, with probability `softmax(logits, dim)`.

    `logits` is a tensor or a DTensor, and so is the result, in int64, without `dim`. For a DTensor
    it is the layout that `torch.argmax` gives, and only that may communicate.

    >>> logits = torch.tensor([[0.0, 0.0, 99.0], [99.0, 0.0, 0.0]])
    >>> fd.random.categorical(fd.random.key(0), logits)
    tensor([2, 0])
    """
    dtype = logits.dtype if isinstance(logits, (torch.Tensor, DTensor)) else None
    if dtype not in FLOATS:
        kind = type(logits).__name__ if dtype is None else dtype_name(dtype)
        raise FdtensorError(
            f"{kind} cannot be logits.", hint="Pass a tensor or DTensor of floats: log(p)."
        )
    if not isinstance(logits, DTensor):
        noise = gumbel(key, tuple(logits.shape), dtype=dtype, device=logits.device)
        return (logits.detach() + noise).argmax(dim)
    settled = _settled(logits).detach()
    noise = gumbel(key, settled.type, settled.comm)
    return call(torch.argmax, call(torch.add, settled, noise), dim)


@keyed
@named_arguments
def permutation(
    key: AnyKey, x: Any, comm: Comm[Any] | None = None, *, dim: int = 0, device: Device = None
) -> Any:
    """The numbers below `x` in random order, in int64; or a tensor with `dim` in that order.

    `x` is an int, a tensor, a DTensor, or a TensorType of one dim: then each rank holds its block
    of the one permutation. Every rank sorts the whole order; of a DTensor elements move by the
    plan of `torch.index_select`.

    >>> fd.random.permutation(fd.random.key(0), 5)
    tensor([0, 1, 4, 3, 2])
    """
    words_of(key)
    if isinstance(x, (torch.Tensor, DTensor)) and len(x.shape):
        count = x.shape[_dim(dim, len(x.shape))]
        if isinstance(x, torch.Tensor):
            return x.index_select(dim, _order(key, count, x.device))
        order = _order(key, count, x.comm.device or "cpu")
        index = distribute(order, x.mesh.layout(None), x.comm)
        return call(torch.index_select, x, dim, index)
    if isinstance(x, TensorType):
        if len(x.shape) != 1 or x.dtype not in (torch.int64, torch.int32):
            raise LayoutError(
                f"{x} is not the type of a permutation.", hint="Use one dim, and int64 or int32."
            )
        type = x

        def draw(places: Places, device: Device) -> torch.Tensor:
            return places.block(_order(key, type.shape[0], device)).to(type.dtype)

        return drawn(key, type, comm, draw, device)
    count = natural(x)
    if count is None:
        raise FdtensorError(
            f"{x!r} cannot be permuted.",
            hint="Pass how many, a tensor with dims, or a TensorType of one dim and a Comm.",
        )
    return _order(key, count, device)


@keyed
@named_arguments
def dropout(key: AnyKey, x: Any, p: float = 0.5) -> Any:
    """`x / (1 - p)` where an element is kept, with probability `1 - p`, and 0 elsewhere.

    `x` is a tensor or a DTensor; which elements are kept is decided by their place in the full
    tensor. Differentiable, without communication: sums that are pending stay so.

    >>> fd.random.dropout(fd.random.key(0), torch.ones(4), 0.5)
    tensor([0., 0., 2., 2.])
    """
    _probability(p)
    dtype = x.dtype if isinstance(x, (torch.Tensor, DTensor)) else None
    if dtype is None or not (dtype.is_floating_point or dtype.is_complex):
        kind = type(x).__name__ if dtype is None else dtype_name(dtype)
        raise FdtensorError(
            f"{kind} cannot be dropped and scaled.", hint="Pass a tensor or DTensor of floats."
        )
    words_of(key)
    if not isinstance(x, DTensor):
        return _dropped(key, x, p, Places.all(tuple(x.shape)))
    compare_key(key, x.comm, [x.mesh], None, is_first=False)
    if not set(x.layout.partial.values()) <= {"sum", "avg"}:
        x = _settled(x)
    return blockwise(x, lambda places, leaf: _dropped(key, leaf, p, places), dtype)


def _settled(x: DTensor[Any]) -> DTensor[Any]:
    """The tensor without anything pending."""
    return x.redistribute(x.type.cotangent().layout) if x.layout.partial else x


def _mask(key: AnyKey, p: float, places: Places, device: Device) -> torch.Tensor:
    single, convert = rounded(p, torch.float32), uniform_of(torch.float32)
    return filled(key, places, torch.bool, 32, lambda x: convert(x) < single, device)


def _dropped(key: AnyKey, x: torch.Tensor, p: float, places: Places) -> torch.Tensor:
    kept = _mask(key, 1 - p, places, x.device)
    return torch.where(kept, x / (1 - p) if p < 1 else torch.zeros_like(x), 0)


def _order(key: AnyKey, count: int, device: Device) -> torch.Tensor:
    """A permutation, by as many stable sorts of random words as make ties unlikely."""
    order: torch.Tensor | None = None
    for _ in range(ceil(3 * log(max(1, count)) / log((1 << 32) - 1))):
        key, part = split(key)
        words = bits(part, (count,), dtype=torch.int32, device=device)
        swaps = (words ^ -(1 << 31)).argsort(stable=True)  # in the order of the unsigned
        order = swaps if order is None else order.index_select(0, swaps)
    if order is None:
        on = key.device if isinstance(key, torch.Tensor) and device is None else device
        return torch.arange(count, device=on)
    return order


def _dim(dim: Any, dims: int) -> int:
    try:
        place = integer(dim)
    except (TypeError, AttributeError):
        place = dims
    if not -dims <= place < dims:
        raise FdtensorError(
            f"dim {dim!r} cannot be permuted in a tensor that has {dims} dims.",
            hint=f"Pass one from {-dims} to {dims - 1}.",
        )
    return place


def _probability(p: Any) -> None:
    if isinstance(p, bool) or not isinstance(p, (int, float)) or isnan(p) or not 0 <= p <= 1:
        raise FdtensorError(f"{p!r} is not a probability.", hint="Pass a number from 0 to 1.")


def _probabilities(p: torch.Tensor) -> torch.Tensor:
    if not recorded(p):
        wrong = p[~((p >= 0) & (p <= 1))]
        if wrong.numel():
            _probability(wrong[0].item())
    return p


def _broadcastable(own_shape: tuple[int, ...], shape: Where) -> None:
    size = shape.shape if isinstance(shape, TensorType) else checked_shape(shape)
    try:
        fits = torch.broadcast_shapes(own_shape, size) == torch.Size(size)
    except RuntimeError:
        fits = False
    if not fits:
        raise FdtensorError(
            f"probabilities of shape {own_shape} cannot be broadcast to {size}.",
            hint="Pass a shape that ends in theirs, or leave it out.",
        )
