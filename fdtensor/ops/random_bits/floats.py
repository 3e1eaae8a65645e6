"""From random bits to floats: uniform, normal and Gumbel numbers, as JAX makes them.

All arithmetic is in ops that IEEE 754 rounds in one way. Products that are added to something are
exact, so that a compiler that fuses them changes nothing; `normal_of` is Giles 2010, "Approximating
the erfinv function", by linear pieces, and for float64 that of `double.py`.
"""

from __future__ import annotations

import functools
from math import erf, sqrt

import numpy as np
import torch

from fdtensor.ops.random_bits.double import erfinv, log
from fdtensor.ops.random_bits.fill import Convert, Width
from fdtensor.ops.random_bits.keys import recorded
from fdtensor.ops.random_bits.rounding import MANTISSA, above, below, least, rounded

__all__ = [
    "FLOATS",
    "exponential_of",
    "gumbel_of",
    "normal_of",
    "truncated_of",
    "uniform_of",
    "width_of",
]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""The dtypes that can be drawn."""


def width_of(dtype: torch.dtype) -> Width:
    """The number of random bits of one float."""
    return 64 if dtype == torch.float64 else 32


def _fraction(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of the mantissa, as an integer."""
    mantissa = MANTISSA[dtype]
    if dtype in (torch.float32, torch.float64):
        return (bits >> (bits.dtype.itemsize * 8 - mantissa)) & ((1 << mantissa) - 1)
    taken = 16 if dtype == torch.float16 else 8  # JAX takes the low bits
    return (bits >> (taken - mantissa)) & ((1 << mantissa) - 1)


def _unit(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In [0, 1): all multiples of 2**-mantissa, equally likely; half types in float32."""
    if dtype == torch.float32:
        return ((bits >> 9) & 0x7FFFFF | 0x3F800000).view(torch.float32) - 1
    if dtype == torch.float64:
        return (_fraction(bits, dtype) | 0x3FF0000000000000).view(torch.float64) - 1
    return _fraction(bits, dtype).to(torch.float32) * 2.0 ** -MANTISSA[dtype]


def uniform_of(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Convert:
    """Uniform in [low, high)."""
    if (low, high) == (0.0, 1.0):
        return lambda bits: _unit(bits, dtype).to(dtype)
    start, end = rounded(low, dtype), rounded(high, dtype)
    if dtype == torch.float64:
        return lambda bits: (_unit(bits, dtype) * (end - start) + start).clamp(min=start)
    span = rounded(end - start, dtype)
    return lambda bits: _between(bits, dtype, start, span)


def _between(bits: torch.Tensor, dtype: torch.dtype, start: float, span: float) -> torch.Tensor:
    """`unit * span + start`, rounded once; the product is exact in float64."""
    scaled = _unit(bits, dtype).double() * span
    if dtype == torch.bfloat16:  # which JAX rounds after each operation
        scaled = _nearest(scaled, dtype).double()
    return _nearest(scaled + start, dtype).clamp(min=start)


def _nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float64 as float32, and that as the nearest numbers of a half type.

    The bits are rounded by hand where a compiler would keep half types in float32.
    """
    single = x.to(torch.float32)
    if dtype == torch.float32 or not recorded(x):
        return single.to(dtype)
    less = 23 - MANTISSA[dtype]
    whole = single.view(torch.int32)
    even = whole + ((1 << less - 1) - 1) + ((whole >> less) & 1)
    fixed = 1.5 * 2.0 ** (23 + least(dtype))
    small = single.abs() < torch.finfo(dtype).tiny
    near = (even >> less << less).view(torch.float32)
    return torch.where(small, (single + fixed) - fixed, near).to(dtype)


def normal_of(dtype: torch.dtype) -> Convert:
    """Normal with mean 0 and variance 1: `sqrt(2) * erfinv(u)` for odd multiples u of

    2**-(mantissa + 1) in (-1, 1).
    """
    mantissa = MANTISSA[dtype]
    if dtype == torch.float64:
        # exact: multiples of 2**-52, less than 1, and then an odd multiple of 2**-53
        return lambda bits: erfinv(_unit(bits, dtype) * 2 - (1 - 2.0**-53)) * sqrt(2)
    if dtype == torch.float32:
        return lambda bits: _normal(
            (((bits ^ -(1 << 31)) >> 7) & -4 | 1).to(torch.float32) * 2.0**-24
        )

    def half(bits: torch.Tensor) -> torch.Tensor:
        odd = _fraction(bits, dtype) * 4 + 1 - (2 << mantissa)
        return _normal(odd.to(torch.float32) * 2.0 ** -(mantissa + 1)).to(dtype)

    return half


def truncated_of(dtype: torch.dtype, lower: float, upper: float) -> Convert:
    """Normal numbers in (lower, upper)."""
    start, end = erf(lower / sqrt(2)), erf(upper / sqrt(2))
    first, last = above(rounded(lower, dtype), dtype), below(rounded(upper, dtype), dtype)
    uniform = uniform_of(dtype, start, end)
    if dtype == torch.float64:
        most = 1 - 2.0**-53
        return lambda bits: (erfinv(uniform(bits).clamp(-most, most)) * sqrt(2)).clamp(first, last)
    most = 1 - 2.0**-24

    def convert(bits: torch.Tensor) -> torch.Tensor:
        u = uniform(bits).to(torch.float32).clamp(-most, most)
        return _normal(u).to(dtype).clamp(first, last)

    return convert


def gumbel_of(dtype: torch.dtype) -> Convert:
    """`-log(-log(u))` for u uniform in (0, 1)."""
    uniform = uniform_of(dtype, torch.finfo(dtype).tiny, 1.0)
    return lambda bits: (-log(-log(uniform(bits).double()))).to(dtype)


def exponential_of(dtype: torch.dtype) -> Convert:
    """`-log(1 - u)` for u uniform in [0, 1): of mean 1."""
    return lambda bits: (-log(1 - _unit(bits, dtype).double())).to(dtype)


# --- sqrt(2) * erfinv(u) / u as linear pieces of y = 1 - u * u -------------------------------

_STEPS = 11
"""Each octave of y has 2**11 pieces; then what is left of the mantissa has 12 bits."""

_REST = 23 - _STEPS
_FIRST = (127 - 24) << _STEPS
"""The bits of 2**-24, less those of the rest: the smallest y is 2**-23."""


def _normal(u: torch.Tensor) -> torch.Tensor:
    """`sqrt(2) * erfinv(u)` in float32 for u in (-1, 1)."""
    square = (u.double() * u.double()).to(torch.float32) if recorded() else u * u
    y = (1 - square).view(torch.int32)
    starts, slopes = _STARTS, _SLOPES
    if u.device.type != "cpu":
        traced = recorded()
        starts, slopes = (
            (starts.to(u.device), slopes.to(u.device)) if traced else _tables_on(u.device)
        )
    piece = ((y >> _REST) - _FIRST).reshape(-1)
    start = starts.index_select(0, piece).view(u.shape)
    slope = slopes.index_select(0, piece).view(u.shape)
    rest = (y & ((1 << _REST) - 1)).to(torch.float32)
    return u * (start + rest * slope)


def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    """The value at the start of each piece, and by how much it grows for a step of y.

    A slope has 12 bits, so that its product with what is left of y is exact.
    """
    bits = np.arange(_FIRST, (127 << _STEPS) + 2, dtype=np.int64) << _REST
    y = bits.astype(np.int32).view(np.float32).astype(np.float64)
    values = _factor(y)
    mantissa, exponent = np.frexp(np.diff(values) / (1 << _REST))
    slopes = np.ldexp(np.rint(np.ldexp(mantissa, 12)), exponent - 12)
    # half of what a chord is off at most, so that the error is the same at both ends and between
    chord = values[:-1] + np.diff(values) / 2
    starts = values[:-1] + (_factor((y[:-1] + y[1:]) / 2) - chord) / 2
    starts[-1] = values[-2]
    return (
        torch.from_numpy(starts.astype(np.float32)),
        torch.from_numpy(slopes.astype(np.float32)),
    )


@functools.cache
def _tables_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return _STARTS.to(device), _SLOPES.to(device)


def _factor(y: np.ndarray) -> np.ndarray:
    """`sqrt(2) * erfinv(u) / u` in float64 by Giles' polynomials for float32."""
    w = -_log(y)
    near, far = w - 2.5, np.sqrt(np.maximum(w, 0)) - 3
    return sqrt(2) * np.where(w < 5, _horner(_NEAR, near), _horner(_FAR, far))


_NEAR = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_FAR = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
    -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


def _horner(coefficients: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def _log(y: np.ndarray) -> np.ndarray:
    """The natural logarithm, by sums, products and quotients: the same on every machine."""
    mantissa, exponent = np.frexp(y)
    small = mantissa < sqrt(0.5)
    mantissa, exponent = np.where(small, 2 * mantissa, mantissa), exponent - small
    s = (mantissa - 1) / (mantissa + 1)
    series = np.zeros_like(s)
    for n in range(25, 0, -2):
        series = series * (s * s) + 1 / n
    return exponent * 0.6931471805599453 + 2 * s * series


_STARTS, _SLOPES = _tables()  # before anything is traced
