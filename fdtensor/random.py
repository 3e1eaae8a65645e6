"""Random numbers that depend on a key and the place in the full tensor, whatever the layout.

Keys and draws are those of JAX, by Threefry-2x32 in its partitionable form. A draw takes a shape
and gives a plain tensor, or takes a `TensorType` and a Comm and gives a DTensor of which each rank
makes its own block, without traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, isnan, log, prod
from typing import Any, TypeAlias

import torch

from fdtensor.comm import Comm, contained
from fdtensor.dtensor import DTensor
from fdtensor.dtypes import dtype_name
from fdtensor.errors import FdtensorError, LayoutError
from fdtensor.kernel import empty
from fdtensor.layout import TensorType
from fdtensor.random_bits import (
    Key,
    Places,
    filled,
    fold_in,
    gumbel_of,
    integers_of,
    key,
    normal_of,
    split,
    truncated_of,
    uniform_of,
)
from fdtensor.random_bits.floats import FLOATS, width_of
from fdtensor.random_bits.keys import AnyKey, words_of
from fdtensor.record import integer, natural

__all__ = [
    "Key",
    "bernoulli",
    "bits",
    "categorical",
    "dropout",
    "fold_in",
    "key",
    "normal",
    "permutation",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]

Where: TypeAlias = Sequence[int] | int | TensorType
"""What is drawn: a shape, or the type of a DTensor, which says its dtype too."""

Device: TypeAlias = str | torch.device | None
Draw: TypeAlias = Callable[[Places, Device], torch.Tensor]

_BITS = {
    dtype: dtype.itemsize * 8
    for dtype in (
        torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.int8, torch.int16, torch.int32, torch.int64,
    )
}  # fmt: skip


def bits(
    key: AnyKey,
    shape: Where,
    comm: Comm[Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Any:
    """Random bits, by default in uint32, or in any integer dtype."""
    dtype = _dtype(shape, dtype, torch.uint32, _BITS, "bits")
    wide = dtype.itemsize == 8
    held = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]

    def draw(places: Places, device: Device) -> torch.Tensor:
        found = filled(key, places, held, 64 if wide else 32, lambda x: x.to(held), device)
        return found if dtype == held else found.view(dtype)

    return _drawn(key, shape, comm, draw, device)


def uniform(
    key: AnyKey,
    shape: Where,
    comm: Comm[Any] | None = None,
    *,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Any:
    """Floats of [low, high), equally likely: for 0 and 1 all multiples of 2**-23 in float32."""
    dtype = _float(shape, dtype, "uniform")
    if not low < high:
        raise FdtensorError(
            f"there is no number from {low} up to, but without, {high}.",
            hint="Let low be below high.",
        )
    return _floats(key, shape, comm, dtype, uniform_of(dtype, float(low), float(high)), device)


def normal(
    key: AnyKey,
    shape: Where,
    comm: Comm[Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Any:
    """Normal floats, of mean 0 and variance 1."""
    dtype = _float(shape, dtype, "normal")
    return _floats(key, shape, comm, dtype, normal_of(dtype), device)


def truncated_normal(
    key: AnyKey,
    lower: float,
    upper: float,
    shape: Where = (),
    comm: Comm[Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Any:
    """Normal floats under the condition that they are between `lower` and `upper`."""
    dtype = _float(shape, dtype, "truncated_normal")
    if not lower < upper:
        raise FdtensorError(
            f"there is no number between {lower} and {upper}.", hint="Let lower be below upper."
        )
    return _floats(key, shape, comm, dtype, truncated_of(dtype, lower, upper), device)


def bernoulli(
    key: AnyKey,
    p: float = 0.5,
    shape: Where = (),
    comm: Comm[Any] | None = None,
    *,
    device: Device = None,
) -> Any:
    """Bools that are True with probability `p`."""
    _probability(p)
    _dtype(shape, None, torch.bool, (torch.bool,), "bernoulli")

    def draw(places: Places, device: Device) -> torch.Tensor:
        return _mask(key, p, places, device)

    return _drawn(key, shape, comm, draw, device)


def randint(
    key: AnyKey,
    shape: Where,
    low: int,
    high: int,
    comm: Comm[Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Any:
    """Ints of [low, high), by default in int64.

    A remainder of 64 bits, for 64-bit dtypes of 128: its bias is below `(high - low) / 2**32`, or
    `/ 2**64`.
    """
    dtype = _dtype(shape, dtype, torch.int64, _BITS, "randint")
    first, last = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    try:
        start, stop = integer(low), integer(high)
    except (TypeError, AttributeError):
        raise FdtensorError(
            f"{low!r} and {high!r} are not the ends of a range of integers.", hint="Pass two ints."
        ) from None
    if not first <= start < stop <= last + 1:
        raise FdtensorError(
            f"{dtype_name(dtype)} has no integers from {start} up to, but without, {stop}.",
            hint=f"Let low be below high, both from {first} to {last + 1}.",
        )
    width = 64 if dtype.itemsize == 8 else 32
    keys = split(key)
    convert = integers_of(start, stop, width)
    held = torch.int64 if width == 64 else torch.int32

    def draw(places: Places, device: Device) -> torch.Tensor:
        upper, lower = (filled(k, places, held, width, _same, device) for k in keys)
        return convert(torch.stack((upper, lower))).to(dtype)

    return _drawn(key, shape, comm, draw, device)


def categorical(key: AnyKey, logits: Any, dim: int = -1) -> Any:
    """The index along `dim` of one of its categories, with probability `softmax(logits, dim)`.

    `logits` is a tensor or a DTensor, and so is the result, in int64, without `dim`. For a DTensor
    it is the layout that `torch.argmax` gives, and only that may communicate.
    """
    dtype = logits.dtype if isinstance(logits, (torch.Tensor, DTensor)) else None
    if dtype not in FLOATS:
        found = type(logits).__name__ if dtype is None else dtype_name(dtype)
        raise FdtensorError(
            f"{found} cannot be logits.", hint="Pass a tensor or DTensor of floats: log(p)."
        )
    convert = gumbel_of(dtype)
    if not isinstance(logits, DTensor):
        noise = _floats(key, tuple(logits.shape), None, dtype, convert, logits.device)
        return (logits.detach() + noise).argmax(dim)
    from fdtensor.spmd import call

    settled = _settled(logits).detach()
    noise = _floats(key, settled.type, settled.comm, dtype, convert, None)
    return call(torch.argmax, call(torch.add, settled, noise), dim)


def permutation(
    key: AnyKey,
    x: Any,
    comm: Comm[Any] | None = None,
    *,
    device: Device = None,
) -> Any:
    """The numbers below `x` in random order, in int64; or a tensor with its dim 0 so ordered.

    `x` is an int, a plain tensor, or a TensorType of one dim: then each rank holds its block of
    the one permutation, for which it sorts the whole.
    """
    words_of(key)
    if isinstance(x, torch.Tensor) and x.dim():
        return x.index_select(0, _order(key, x.shape[0], x.device))
    if isinstance(x, TensorType):
        if len(x.shape) != 1 or x.dtype not in (torch.int64, torch.int32):
            raise LayoutError(
                f"{x} is not the type of a permutation.", hint="Use one dim, and int64 or int32."
            )
        type = x

        def draw(places: Places, device: Device) -> torch.Tensor:
            place = places.tensor(device)
            return _order(key, type.shape[0], device).index_select(0, place).to(type.dtype)

        return _drawn(key, type, comm, draw, device)
    count = natural(x)
    if count is None:
        raise FdtensorError(
            f"{x!r} cannot be permuted.",
            hint="Pass how many, a tensor with dims, or a TensorType of one dim and a Comm.",
        )
    return _order(key, count, device)


def dropout(key: AnyKey, x: Any, p: float = 0.5) -> Any:
    """`x / (1 - p)` where an element is kept, with probability `1 - p`, and 0 elsewhere.

    `x` is a tensor or a DTensor; which elements are kept is decided by their place in the full
    tensor. Differentiable, without communication: sums that are pending stay so.
    """
    _probability(p)
    dtype = x.dtype if isinstance(x, (torch.Tensor, DTensor)) else None
    if dtype is None or not (dtype.is_floating_point or dtype.is_complex):
        found = type(x).__name__ if dtype is None else dtype_name(dtype)
        raise FdtensorError(
            f"{found} cannot be dropped and scaled.", hint="Pass a tensor or DTensor of floats."
        )
    if not isinstance(x, DTensor):
        return _dropped(key, x, p, Places.all(tuple(x.shape)))
    if not set(x.layout.partial.values()) <= {"sum", "avg"}:
        x = _settled(x)
    dst = x.type
    leaves = x.comm.leaves(x.local)
    rank = getattr(x.comm, "rank", None)
    words_of(key)
    ranks = dst.mesh.order if rank is None else (rank,)
    made = [
        leaf if (coord := dst.mesh.coord(r)) is None
        else _dropped(key, leaf, p, Places(dst.shape, dst.box(coord)))
        for r, leaf in zip(ranks, leaves, strict=True)
    ]  # fmt: skip
    return DTensor(x.comm.value(made), dst, x.comm)


# --- what they share -------------------------------------------------------------------------


def _same(bits: torch.Tensor) -> torch.Tensor:
    return bits


def _floats(
    key: AnyKey, shape: Where, comm: Any, dtype: torch.dtype, convert: Any, device: Device
) -> Any:
    def draw(places: Places, device: Device) -> torch.Tensor:
        return filled(key, places, dtype, width_of(dtype), convert, device)

    return _drawn(key, shape, comm, draw, device)


def _drawn(key: AnyKey, shape: Where, comm: Any, draw: Draw, device: Device) -> Any:
    """The tensor of a shape, or each rank's block of a DTensor."""
    words_of(key)
    if not isinstance(shape, TensorType):
        if comm is not None:
            raise FdtensorError(
                f"a Comm goes with the type of a DTensor, not with {shape!r}.",
                hint="Pass TensorType(shape, dtype, layout) and the Comm.",
            )
        return draw(Places.all(_shape(shape)), device)
    if comm is None:
        raise FdtensorError(
            f"{shape} is drawn on a Comm.", hint="Pass one: connect(mesh), or SimulatedComm(mesh)."
        )
    if shape.layout.partial:
        raise LayoutError(
            f"{shape} has pending terms, which cannot be drawn one by one.",
            hint="Draw type.cotangent(), and redistribute it.",
        )
    contained("a draw", [shape.mesh], comm.mesh)
    type, there = shape, device or getattr(comm, "device", torch.device("cpu"))

    def block(rank: int) -> torch.Tensor:
        coord = type.mesh.coord(rank)
        if coord is None:
            return empty(type, rank, torch.device(there))
        return draw(Places(type.shape, type.box(coord)), there)

    return DTensor(comm.each(type, block), type, comm)


def _settled(x: DTensor[Any]) -> DTensor[Any]:
    """The tensor without anything pending."""
    return x.redistribute(x.type.cotangent().layout) if x.layout.partial else x


def _mask(key: AnyKey, p: float, places: Places, device: Device) -> torch.Tensor:
    single = torch.tensor(p, dtype=torch.float32).item()
    convert = uniform_of(torch.float32)
    return filled(key, places, torch.bool, 32, lambda x: convert(x) < single, device)


def _dropped(key: AnyKey, x: torch.Tensor, p: float, places: Places) -> torch.Tensor:
    kept = _mask(key, 1 - p, places, x.device)
    return torch.where(kept, x / (1 - p) if p < 1 else torch.zeros_like(x), 0)


def _order(key: AnyKey, count: int, device: Device) -> torch.Tensor:
    """A permutation, by as many stable sorts of random words as make ties unlikely."""
    found: torch.Tensor | None = None
    for _ in range(ceil(3 * log(max(1, count)) / log((1 << 32) - 1))):
        key, part = split(key)
        words = bits(part, (count,), dtype=torch.int32, device=device)
        order = (words ^ -(1 << 31)).argsort(stable=True)  # in the order of the unsigned
        found = order if found is None else found.index_select(0, order)
    if found is None:
        held = key.device if isinstance(key, torch.Tensor) and device is None else device
        return torch.arange(count, device=held)
    return found


def _shape(shape: Any) -> tuple[int, ...]:
    try:
        sizes = (integer(shape),) if isinstance(shape, int) else tuple(map(integer, shape))
    except (TypeError, AttributeError):
        sizes = (-1,)
    if any(size < 0 for size in sizes) or prod(sizes) >> 63:
        raise FdtensorError(
            f"{shape!r} is not a shape.",
            hint="Pass a tuple of ints, 0 or more, or a TensorType and a Comm.",
        )
    return sizes


def _dtype(shape: Any, given: Any, default: torch.dtype, among: Any, about: str) -> torch.dtype:
    """The dtype that is drawn, one of these."""
    found = given or default
    if isinstance(shape, TensorType):
        if given is not None and given != shape.dtype:
            raise FdtensorError(
                f"{shape} is not of {given}.", hint="Leave dtype out: the type says it."
            )
        found = shape.dtype
    if found not in among:
        names = ", ".join(map(dtype_name, among))
        said = dtype_name(found) if isinstance(found, torch.dtype) else repr(found)
        raise FdtensorError(f"{about} cannot draw {said}.", hint=f"Use one of: {names}.")
    return found


def _float(shape: Any, given: Any, about: str) -> torch.dtype:
    return _dtype(shape, given, torch.get_default_dtype(), FLOATS, about)


def _probability(p: Any) -> None:
    if isinstance(p, bool) or not isinstance(p, (int, float)) or isnan(p) or not 0 <= p <= 1:
        raise FdtensorError(f"{p!r} is not a probability.", hint="Pass a number from 0 to 1.")
