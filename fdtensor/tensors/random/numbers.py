"""`bits`, `uniform`, `normal` and the like: numbers drawn one by one, each at its place."""

from __future__ import annotations

from math import nan
from typing import Any

import torch

from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.record import integer
from fdtensor.layouts.signatures import named_arguments
from fdtensor.ops.random_bits import (
    Places,
    exponential_of,
    filled,
    gumbel_of,
    integers,
    normal_of,
    truncated_of,
    uniform_of,
)
from fdtensor.ops.random_bits.keys import AnyKey
from fdtensor.runtime.comm import Comm
from fdtensor.tensors.random.keyed import keyed
from fdtensor.tensors.random.target import Device, Where, checked_dtype, drawn, floats

__all__ = ["bits", "exponential", "gumbel", "normal", "randint", "truncated_normal", "uniform"]

_INTEGERS = (
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


@keyed
@named_arguments
def bits(
    key: AnyKey,
    shape: Where,
    comm: Comm[Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Any:
    """Random bits, by default in uint32, or in any integer dtype.

    >>> fd.random.bits(fd.random.key(0), (3,))
    tensor([4070199207, 4202968722, 1427181096], dtype=torch.uint32)
    """
    dtype = checked_dtype(shape, dtype, torch.uint32, _INTEGERS, "bits")
    kept = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]

    def draw(places: Places, device: Device) -> torch.Tensor:
        width = 64 if kept == torch.int64 else 32
        words = filled(key, places, kept, width, lambda x: x.to(kept), device)
        return words if dtype == kept else words.view(dtype)

    return drawn(key, shape, comm, draw, device)


@keyed
@named_arguments
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
    """Floats of [low, high), equally likely: for 0 and 1 all multiples of 2**-23 in float32.

    For other ends they are rounded, as in JAX, and a few may be `high` itself.

    >>> fd.random.uniform(fd.random.key(0), (3,))
    tensor([0.9477, 0.9786, 0.3323])
    """
    start, end = _ends(low, high)

    def law(dtype: torch.dtype) -> Any:
        if not abs(end - start) <= torch.finfo(dtype).max:
            raise FdtensorError(
                f"{dtype_name(dtype)} cannot hold {end} - {start}.",
                hint="Use ends that are closer to each other, or a wider dtype.",
            )
        return uniform_of(dtype, start, end)

    return floats("uniform", law, key, shape, comm, dtype, device, (start, end))


@keyed
@named_arguments
def normal(
    key: AnyKey,
    shape: Where,
    comm: Comm[Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Any:
    """Normal floats, of mean 0 and variance 1.

    >>> fd.random.normal(fd.random.key(0), (3,))
    tensor([ 1.6226,  2.0253, -0.4336])
    """
    return floats("normal", normal_of, key, shape, comm, dtype, device)


@keyed
@named_arguments
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
    """Normal floats under the condition that they are between `lower` and `upper`.

    >>> fd.random.truncated_normal(fd.random.key(0), -1.0, 1.0, (3,))
    tensor([ 0.8619,  0.9413, -0.2910])
    """
    start, end = _ends(lower, upper)

    def law(dtype: torch.dtype) -> Any:
        return truncated_of(dtype, start, end)

    return floats("truncated_normal", law, key, shape, comm, dtype, device, (start, end))


@keyed
@named_arguments
def exponential(
    key: AnyKey,
    shape: Where,
    comm: Comm[Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Any:
    """Floats of the exponential distribution of mean 1: `-log(1 - u)`.

    >>> fd.random.exponential(fd.random.key(0), (3,))
    tensor([2.9501, 3.8434, 0.4039])
    """
    return floats("exponential", exponential_of, key, shape, comm, dtype, device)


@keyed
@named_arguments
def gumbel(
    key: AnyKey,
    shape: Where,
    comm: Comm[Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Any:
    """Floats of the Gumbel distribution: `-log(-log(u))`.

    >>> fd.random.gumbel(fd.random.key(0), (3,))
    tensor([ 2.9234,  3.8326, -0.0969])
    """
    return floats("gumbel", gumbel_of, key, shape, comm, dtype, device)


@keyed
@named_arguments
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

    >>> fd.random.randint(fd.random.key(0), (4,), 0, 10)
    tensor([5, 1, 5, 7])
    """
    dtype = checked_dtype(shape, dtype, torch.int64, _INTEGERS, "randint")
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

    def draw(places: Places, device: Device) -> torch.Tensor:
        return integers(key, places, start, stop, dtype, device)

    return drawn(key, shape, comm, draw, device)


def _ends(low: Any, high: Any) -> tuple[float, float]:
    try:
        start, end = float(low), float(high)
    except (TypeError, ValueError):
        start = end = nan
    if not start < end:
        raise FdtensorError(
            f"there is no number between {low!r} and {high!r}.",
            hint="Pass two numbers, the smaller one first.",
        )
    return start, end
