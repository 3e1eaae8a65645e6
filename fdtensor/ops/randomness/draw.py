"""`DRAW`: random numbers as an op, of which each rank computes just its block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.layouts.blocks import Box
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.remembered import remembered
from fdtensor.ops.own_ops import own_op
from fdtensor.ops.random_bits import (
    Key,
    Places,
    exponential_of,
    filled,
    filled_by_each,
    fold_in,
    gumbel_of,
    normal_of,
    truncated_of,
    uniform_of,
)
from fdtensor.ops.random_bits.fill import Convert, Width
from fdtensor.ops.random_bits.floats import width_of
from fdtensor.ops.random_bits.keys import INTEGERS

__all__ = ["DRAW", "boxed", "draw_by"]

_STREAMS = 0x746F7263
"""The number folded into a key before that of a stream, so that `split` makes no such key."""


def draw_by(
    key: torch.Tensor, kind: str, ends: Sequence[float], places: Places, dtype: torch.dtype
) -> torch.Tensor:
    """The numbers of a key itself for a whole tensor, as an op."""
    return DRAW(key, None, kind, list(ends), list(places.shape), dtype)


def _draw(
    key: torch.Tensor,
    stream: int | None,
    kind: str,
    ends: Sequence[float],
    size: Sequence[int],
    dtype: torch.dtype,
    box: Sequence[int] = (),
) -> torch.Tensor:
    places, (width, convert) = _places(tuple(size), tuple(box)), _law(kind, ends, dtype)
    if key.dim() > 1:
        assert stream is None
        return filled_by_each(key, places, dtype, width, convert)
    words: Any = key
    if key.device.type == "cpu":  # elsewhere its words are not waited for
        words = Key(*[word & 0xFFFFFFFF for word in key.tolist()])
    if stream is not None:
        words = fold_in(fold_in(words, _STREAMS), stream)
    return filled(words, places, dtype, width, convert, key.device)


def _fake(
    key: torch.Tensor,
    stream: int | None,
    kind: str,
    ends: Sequence[float],
    size: Sequence[int],
    dtype: torch.dtype,
    box: Sequence[int] = (),
) -> torch.Tensor:
    _check(key, stream, kind, ends, dtype)
    shape = _places(tuple(size), tuple(box)).local_shape if box else tuple(size)
    return key.new_empty((*key.shape[:-1], *shape), dtype=dtype)


def _by_each(_info: Any, dims: Sequence[int | None], key: torch.Tensor, *args: Any) -> Any:
    assert dims[0] is not None
    return DRAW(key.movedim(dims[0], 0), *args), 0


DRAW = own_op(
    "draw(Tensor key, int? stream, str kind, Scalar[] ends, SymInt[] size, ScalarType dtype, "
    "int[] box=[]) -> Tensor",
    _draw,
    _fake,
    _by_each,
)
"""The numbers of a stream of a key, for a tensor of `size`, or for its block `box` alone.

Without a stream they are those that `fdtensor.random` draws by the key, or by each of the keys of a
tensor of shape (..., 2). The kinds are `uniform` in [low, high), `normal`, of mean 0 and variance
1, `truncated_normal` between low and high, `exponential`, `gumbel`, `bernoulli`, bools that are
True with probability p, and `bits`, in int32 or int64. `ends` has low and high, or p.
"""


_HINT = "Draw by fdtensor.random, or by the random functions of torch with key=random.key(0)."
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_KINDS = {
    "uniform": (2, _FLOATS),
    "normal": (0, _FLOATS),
    "truncated_normal": (2, _FLOATS),
    "exponential": (0, _FLOATS),
    "gumbel": (0, _FLOATS),
    "bernoulli": (1, (torch.bool,)),
    "bits": (0, (torch.int32, torch.int64)),
}
"""How many ends each kind has, and the dtypes of its numbers."""


def _check(
    key: torch.Tensor, stream: int | None, kind: str, ends: Sequence[float], dtype: torch.dtype
) -> None:
    """Raises `TraceError` for a draw that no trace has, but a text that is read may."""
    count, dtypes = _KINDS.get(kind, (0, ()))
    words = tuple(key.shape if stream is not None else key.shape[-1:])
    if words != (2,) or key.dtype not in INTEGERS:
        raise TraceError("a draw is by a key that is not two words.", hint=_HINT)
    if len(ends) != count or dtype not in dtypes:
        raise TraceError(
            f"a draw of {kind!r} with {len(ends)} ends and of {dtype} cannot be.", hint=_HINT
        )


def _law(kind: str, ends: Sequence[float], dtype: torch.dtype) -> tuple[Width, Convert]:
    """How many bits an element has, and what it is made of them."""
    match kind:
        case "uniform":
            return width_of(dtype), uniform_of(dtype, *ends)
        case "normal":
            return width_of(dtype), normal_of(dtype)
        case "truncated_normal":
            return width_of(dtype), truncated_of(dtype, *ends)
        case "exponential":
            return width_of(dtype), exponential_of(dtype)
        case "gumbel":
            return width_of(dtype), gumbel_of(dtype)
        case "bernoulli":
            unit, single = uniform_of(torch.float32), torch.tensor(*ends, dtype=torch.float32)
            return 32, lambda bits: unit(bits) < single.item()
        case _:
            return 64 if dtype == torch.int64 else 32, lambda bits: bits


def boxed(box: Box) -> list[int]:
    """A box as numbers: for each dim how many intervals it has, and where they start and stop."""
    return [n for part in box for n in (len(part), *(end for pair in part for end in pair))]


@remembered(4096)
def _places(size: tuple[int, ...], box: tuple[int, ...]) -> Places:
    """The places of the block that these numbers stand for; of the whole tensor without any."""
    if not box:
        return Places.all(size)
    numbers = iter(box)
    parts = [tuple([(next(numbers), next(numbers)) for _ in range(next(numbers))]) for _ in size]
    return Places(size, tuple(parts))
