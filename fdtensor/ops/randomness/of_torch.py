"""`replacement`: each random op of torch as draws from a key and plain ops.

It has the distribution of the op it stands for, not its numbers. An operand that only gives a
shape, such as that of `uniform`, is not read. Ops that draw until a number fits (Poisson, gamma,
binomial, Dirichlet) have no replacement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdtensor.ops.value_checks import require

__all__ = ["Draw", "replacement"]

aten = torch.ops.aten

Tensor = torch.Tensor
Draw = Callable[..., Tensor]
"""`draw(kind, size, dtype, *ends)`."""

_REPLACEMENTS: dict[Any, Callable[..., Any]] = {}


def replacement(op: Any) -> Callable[..., Any] | None:
    """The function of a `Draw` and the arguments that is recorded in place of an op, or None."""
    return _REPLACEMENTS.get(op)


def _for(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(f: Callable[..., Any]) -> Callable[..., Any]:
        _REPLACEMENTS.update(dict.fromkeys(ops, f))
        return f

    return register


def _normal(draw: Draw, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    if not dtype.is_complex:
        return draw("normal", size, dtype)
    half = dtype.to_real()
    real, imaginary = draw("normal", size, half), draw("normal", size, half)
    return torch.complex(real, imaginary) * math.sqrt(0.5)


def _integers(draw: Draw, size: Sequence[int], dtype: torch.dtype, low: int, high: int) -> Tensor:
    """Integers in [low, high), in any dtype: remainders of 63 bits, of a bias below 2**-63 each."""
    count = high - low
    bits = draw("bits", size, torch.int64)
    if count < 1 << 63:
        bits = bits.bitwise_and((1 << 63) - 1).remainder(count)
    return _cast(bits + low, dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)` in one op: composite ones are not decomposed where this runs."""
    return x if x.dtype == dtype else aten._to_copy.default(x, dtype=dtype)


def _default(dtype: torch.dtype | None) -> torch.dtype:
    return dtype or torch.get_default_dtype()


# --- with a size ------------------------------------------------------------------------------


@_for(aten.rand.default, aten.rand.generator)
def _rand(draw: Draw, size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    dtype = _default(dtype)
    if not dtype.is_complex:
        return draw("uniform", size, dtype, 0.0, 1.0)
    half = dtype.to_real()
    return torch.complex(*[draw("uniform", size, half, 0.0, 1.0) for _ in range(2)])


@_for(aten.randn.default, aten.randn.generator)
def _randn(draw: Draw, size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _normal(draw, size, _default(dtype))


@_for(aten.normal.float_float)
def _normal_of_size(
    draw: Draw, mean: float, std: float, size: Any, *, dtype: Any = None, **_: Any
) -> Tensor:
    return _scaled(_normal(draw, size, _default(dtype)), mean, std)


@_for(aten.randint.default, aten.randint.generator)
def _randint(draw: Draw, high: int, size: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _integers(draw, size, dtype or torch.int64, 0, high)


@_for(aten.randint.low, aten.randint.low_generator)
def _randint_low(
    draw: Draw, low: int, high: int, size: Any, *, dtype: Any = None, **_: Any
) -> Tensor:
    return _integers(draw, size, dtype or torch.int64, low, high)


@_for(aten.randperm.default, aten.randperm.generator)
def _randperm(draw: Draw, n: int, *, dtype: Any = None, **_: Any) -> Tensor:
    """The order of random words of 64 bits, whose ties are rarer than `n**2 / 2**64`."""
    words = draw("bits", [n], torch.int64)
    return _cast(aten.sort.stable(words, stable=True)[1], dtype or torch.int64)


# --- in the shape of a tensor -----------------------------------------------------------------


@_for(aten.rand_like.default, aten.rand_like.generator)
def _rand_like(draw: Draw, x: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
    return _rand(draw, x.shape, dtype=dtype or x.dtype)


@_for(aten.randn_like.default, aten.randn_like.generator)
def _randn_like(draw: Draw, x: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
    return _normal(draw, x.shape, dtype or x.dtype)


@_for(aten.randint_like.default, aten.randint_like.generator)
def _randint_like(draw: Draw, x: Tensor, high: int, *, dtype: Any = None, **_: Any) -> Tensor:
    return _integers(draw, x.shape, dtype or x.dtype, 0, high)


@_for(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def _randint_like_low(
    draw: Draw, x: Tensor, low: int, high: int, *, dtype: Any = None, **_: Any
) -> Tensor:
    return _integers(draw, x.shape, dtype or x.dtype, low, high)


@_for(aten.uniform.default)
def _uniform(draw: Draw, x: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
    if low == high:
        return torch.full_like(x, low)
    return draw("uniform", x.shape, x.dtype, low, high)


@_for(aten.normal_functional.default)
def _normal_like(draw: Draw, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return _scaled(_normal(draw, x.shape, x.dtype), mean, std)


@_for(aten.normal.Tensor_float)
def _normal_around(draw: Draw, mean: Tensor, std: float = 1.0, **_: Any) -> Tensor:
    return _normal(draw, mean.shape, mean.dtype) * std + mean


@_for(aten.normal.float_Tensor)
def _normal_as_wide(draw: Draw, mean: float, std: Tensor, **_: Any) -> Tensor:
    return _normal(draw, std.shape, std.dtype) * std + mean


@_for(aten.normal.Tensor_Tensor)
def _normal_each(draw: Draw, mean: Tensor, std: Tensor, **_: Any) -> Tensor:
    size = torch.broadcast_shapes(mean.shape, std.shape)
    return _normal(draw, size, mean.dtype) * std + mean


def _scaled(x: Tensor, mean: float, std: float) -> Tensor:
    x = x if std == 1 else x * std
    return x if mean == 0 else x + mean


@_for(aten.log_normal.default)
def _log_normal(draw: Draw, x: Tensor, mean: float = 1.0, std: float = 2.0, **_: Any) -> Tensor:
    return _scaled(_normal(draw, x.shape, x.dtype), mean, std).exp()


@_for(aten.exponential.default)
def _exponential(draw: Draw, x: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    return _exponentials(draw, x.shape, x.dtype) / lambd


@_for(aten.geometric.default)
def _geometric(draw: Draw, x: Tensor, p: float, **_: Any) -> Tensor:
    wide = torch.float64 if x.dtype in (torch.float64, torch.int64) else torch.float32
    return _cast((_exponentials(draw, x.shape, wide) / -math.log1p(-p)).floor() + 1, x.dtype)


@_for(aten.cauchy.default)
def _cauchy(draw: Draw, x: Tensor, median: float = 0.0, sigma: float = 1.0, **_: Any) -> Tensor:
    unit = draw("uniform", x.shape, x.dtype, 0.0, 1.0)
    return _scaled(((unit - 0.5) * math.pi).tan(), median, sigma)


@_for(aten.random.default)
def _random(draw: Draw, x: Tensor, **_: Any) -> Tensor:
    return _random_to(draw, x, _past(x.dtype))


@_for(aten.random.to)
def _random_to(draw: Draw, x: Tensor, to: int, **_: Any) -> Tensor:
    return _integers(draw, x.shape, x.dtype, 0, to)


@_for(getattr(aten.random, "from"))
def _random_from(draw: Draw, x: Tensor, start: int, to: int | None, **_: Any) -> Tensor:
    return _integers(draw, x.shape, x.dtype, start, _past(x.dtype) if to is None else to)


def _past(dtype: torch.dtype) -> int:
    """The end of the integers that `random_` draws by default: all that the dtype holds exactly."""
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps) + 1
    return 2 if dtype == torch.bool else torch.iinfo(dtype).max + (dtype != torch.int64)


def _exponentials(draw: Draw, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Exponential numbers of rate 1."""
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    return _cast(-torch.log1p(-draw("uniform", size, wide, 0.0, 1.0)), dtype)


# --- that pick and drop -----------------------------------------------------------------------


@_for(aten.bernoulli.p)
def _bernoulli_p(draw: Draw, x: Tensor, p: float = 0.5, **_: Any) -> Tensor:
    if p in (0, 1):
        return torch.full_like(x, p)
    return _cast(draw("bernoulli", x.shape, torch.bool, p), x.dtype)


@_for(aten.bernoulli.default)
def _bernoulli(draw: Draw, p: Tensor, **_: Any) -> Tensor:
    return _bernoulli_each(draw, p, p)


@_for(aten.bernoulli.Tensor)
def _bernoulli_each(draw: Draw, x: Tensor, p: Tensor, **_: Any) -> Tensor:
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    return _cast(draw("uniform", x.shape, wide, 0.0, 1.0) < p, x.dtype)


@_for(aten.native_dropout.default)
def _native_dropout(draw: Draw, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = draw("bernoulli", x.shape, torch.bool, 1 - p)
    return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


@_for(aten._fused_dropout.default)
def _fused_dropout(draw: Draw, x: Tensor, p: float, **_: Any) -> tuple[Tensor, Tensor]:
    kept = draw("bernoulli", x.shape, torch.bool, p)  # its `p` is that of keeping
    return x * kept * (1 / p if p else 0.0), _cast(kept, torch.uint8)


@_for(aten.rrelu_with_noise_functional.default)
def _rrelu(
    draw: Draw,
    x: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    if not training:
        return torch.where(x <= 0, x * ((lower + upper) / 2), x), noise
    slope = _uniform(draw, x, lower, upper)
    slope = torch.where(x <= 0, slope, torch.ones_like(slope))
    return x * slope, slope


@_for(aten.multinomial.default)
def _multinomial(draw: Draw, p: Tensor, count: int, replacement: bool = False, **_: Any) -> Tensor:
    """The categories whose exponential times, of rate `p`, are the shortest."""
    if not replacement:
        times = _exponentials(draw, p.shape, p.dtype)
        rates, chosen = (p / times.clamp(min=_TINY)).topk(count, -1)
    else:
        times = _exponentials(draw, (*p.shape[:-1], count, p.shape[-1]), p.dtype)
        rates, chosen = (p.unsqueeze(-2) / times.clamp(min=_TINY)).max(-1)
    first = aten.slice.Tensor(rates, -1, 0, 1)
    require(first > 0, "weights of multinomial, not all of a row 0")
    return chosen


_TINY = 2.0**-24
"""Below the shortest exponential time that is not 0, in float32."""
