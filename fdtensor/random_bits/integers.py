"""From random bits to integers of a range, as JAX makes them: a remainder of twice the bits."""

from __future__ import annotations

import torch

from fdtensor.random_bits.fill import Convert, Width

__all__ = ["integers_of"]

_WORD = 0xFFFFFFFF


def integers_of(low: int, high: int, width: Width) -> Convert:
    """Integers in [low, high) of bits of shape (2, n), in int64: `low` plus a remainder.

    Its bias is below `(high - low) / 2**width`.
    """
    span = (high - low) % (1 << width)
    factor = _times(1 << width // 2, 1, span, width)
    factor = _times(factor, factor, span, width)
    if width == 32:

        def narrow(bits: torch.Tensor) -> torch.Tensor:
            upper, lower = (bits.to(torch.int64) & _WORD).unbind()
            if span:
                upper, lower = upper % span, lower % span
            offset = (upper * factor + lower) & _WORD
            return low + (offset % span if span else offset)

        return narrow

    def wide(bits: torch.Tensor) -> torch.Tensor:
        upper, lower = bits.unbind()
        offset = _remainder(upper, span) * _signed(factor) + _remainder(lower, span)
        return low_signed + _remainder(offset, span)

    low_signed = _signed(low)
    return wide


def _times(a: int, b: int, span: int, width: Width) -> int:
    """`a * b` in so many bits, and its remainder; of nothing is the number itself."""
    product = a * b % (1 << width)
    return product % span if span else product


def _signed(number: int) -> int:
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


def _remainder(bits: torch.Tensor, span: int) -> torch.Tensor:
    """The remainder of unsigned int64; of nothing is the number itself."""
    if not span:
        return bits
    if span >> 63:
        flipped = bits ^ -(1 << 63)
        return torch.where(flipped >= _signed(span ^ (1 << 63)), bits - _signed(span), bits)
    half = (bits >> 1) & ((1 << 63) - 1)
    rest = bits - (half // span << 1) * span
    low_enough = (rest >= 0) & (rest < span)  # it may be twice the span, above the sign
    return torch.where(low_enough, rest, rest - span)
