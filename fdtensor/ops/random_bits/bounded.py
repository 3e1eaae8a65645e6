"""From random bits to integers of a range, as JAX makes them: a remainder of twice the bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fdtensor.ops.random_bits.fill import Convert, Width, filled
from fdtensor.ops.random_bits.keys import AnyKey, recorded, split
from fdtensor.ops.random_bits.places import Places

__all__ = ["integers", "integers_of"]

_WORD = 0xFFFFFFFF


def integers(
    key: AnyKey,
    places: Places,
    low: int,
    high: int,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The integers in [low, high) of these places, from two streams of bits."""
    width: Width = 64 if dtype.itemsize == 8 else 32
    keys = tuple(split(key))
    if _span_and_factor(low, high, width)[1] == 0:
        keys = keys[1:]  # the upper bits do not count
    return filled(keys, places, dtype, width, integers_of(low, high, width), device)


def integers_of(low: int, high: int, width: Width) -> Convert:
    """Integers in [low, high) of bits of shape (2, n): `low` plus a remainder.

    They have so many bits too, as an int32 or int64, which wraps around. Their bias is below
    `(high - low) / 2**width`.
    """
    span, factor = _span_and_factor(low, high, width)

    def convert(bits: torch.Tensor) -> torch.Tensor:
        if bits.device.type == "cpu" and not recorded(bits):
            return torch.from_numpy(_by_numpy(bits.numpy(), low, span, factor))
        if width == 64:
            *upper, lower = (_remainder(x, span) for x in bits.unbind())
            for x in upper:
                lower = _remainder(x * _signed(factor) + lower, span)
            return lower + _signed(low)
        *upper, lower = (_rest(x, span) for x in (bits.to(torch.int64) & _WORD).unbind())
        for x in upper:
            lower = _rest((x * factor + lower) & _WORD, span)
        return (lower + low).to(torch.int32)

    return convert


def _span_and_factor(low: int, high: int, width: Width) -> tuple[int, int]:
    """The number of integers, 0 for all of the width, and the factor of the upper bits."""
    span = (high - low) % (1 << width)
    factor = _times(1 << width // 2, 1, span, width)
    return span, _times(factor, factor, span, width)


def _times(a: int, b: int, span: int, width: Width) -> int:
    """The remainder of `a * b` in so many bits; for a span of 0 the number itself."""
    product = a * b % (1 << width)
    return product % span if span else product


def _by_numpy(bits: np.ndarray, low: int, span: int, factor: int) -> np.ndarray:
    """Integers by numpy on the CPU: it has unsigned ones, and divides many by one at a time."""
    words: Any = bits.view(bits.dtype.str.replace("i", "u"))
    of = words.dtype.type

    def rest(x: Any) -> Any:
        if not span & (span - 1):
            return x & of((span - 1) % (1 << 8 * x.itemsize))
        quotient = x // of(span)
        quotient *= of(span)
        return np.subtract(x, quotient, quotient)

    integers = rest(words[-1])
    if len(words) == 2:
        upper = rest(words[0])
        upper *= of(factor)
        upper += integers
        integers = rest(upper)
    integers += of(low % (1 << 8 * integers.itemsize))
    return integers.view(bits.dtype)


def _signed(number: int) -> int:
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


def _rest(x: torch.Tensor, span: int) -> torch.Tensor:
    return x % span if span else x


def _remainder(bits: torch.Tensor, span: int) -> torch.Tensor:
    """The remainder of unsigned int64; for a span of 0 the number itself."""
    if not span:
        return bits
    if span >> 63:
        flipped = bits ^ -(1 << 63)
        return torch.where(flipped >= _signed(span ^ (1 << 63)), bits - _signed(span), bits)
    half = (bits >> 1) & ((1 << 63) - 1)
    rest = bits - (half // span << 1) * span
    low_enough = (rest >= 0) & (rest < span)  # it may be twice the span, above the sign
    return torch.where(low_enough, rest, rest - span)
