"""`DRAW`: random numbers as an op, of which each rank computes just its block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.layouts.blocks import Box
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.remembered import remembered
from fdtensor.ops.random_bits import Key, Places, filled, fold_in, normal_of, uniform_of
from fdtensor.ops.random_bits.floats import width_of
from fdtensor.ops.random_bits.keys import AnyKey

__all__ = ["DRAW", "boxed"]

_STREAMS = 0x746F7263
"""The number folded into a key before that of a stream, so that `split` makes no such key."""

torch.library.define(
    "fdtensor::draw",
    "(Tensor key, int stream, str kind, Scalar[] ends, SymInt[] size, ScalarType dtype, "
    "int[] box=[]) -> Tensor",
)

DRAW = torch.ops.fdtensor.draw.default
"""The numbers of a stream of a key, for a tensor of `size`, or for its block `box` alone.

The kinds are `uniform` in [low, high), `normal`, of mean 0 and variance 1, `bernoulli`, bools that
are True with probability p, and `bits`, in int32 or int64. `ends` has low and high, or p.
"""


@torch.library.impl("fdtensor::draw", ("cpu", "cuda"))
def _draw(
    key: torch.Tensor,
    stream: int,
    kind: str,
    ends: Sequence[float],
    size: Sequence[int],
    dtype: torch.dtype,
    box: Sequence[int] = (),
) -> torch.Tensor:
    words: Any = key
    if key.device.type == "cpu":  # elsewhere its words are not waited for
        words = Key(*[word & 0xFFFFFFFF for word in key.tolist()])
    words = fold_in(fold_in(words, _STREAMS), stream)
    return _filled(words, _places(tuple(size), tuple(box)), kind, ends, dtype, key.device)


@torch.library.register_fake("fdtensor::draw")
def _(
    key: torch.Tensor,
    _stream: int,
    kind: str,
    ends: Sequence[float],
    size: Sequence[int],
    dtype: torch.dtype,
    box: Sequence[int] = (),
) -> torch.Tensor:
    _check(key, kind, ends, dtype)
    shape = _places(tuple(size), tuple(box)).local_shape if box else tuple(size)
    return key.new_empty(shape, dtype=dtype)


_HINT = "Draw by fdtensor.random, or by the random functions of torch with key=random.key(0)."
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_WORDS = (torch.int64, torch.int32, torch.uint32)

_KINDS = {
    "uniform": (2, _FLOATS),
    "normal": (0, _FLOATS),
    "bernoulli": (1, (torch.bool,)),
    "bits": (0, (torch.int32, torch.int64)),
}
"""How many ends each kind has, and the dtypes of its numbers."""


def _check(key: torch.Tensor, kind: str, ends: Sequence[float], dtype: torch.dtype) -> None:
    """Raises `TraceError` for a draw that no trace has, but a text that is read may."""
    count, dtypes = _KINDS.get(kind, (0, ()))
    if tuple(key.shape) != (2,) or key.dtype not in _WORDS:
        raise TraceError("a draw is by a key that is not two words.", hint=_HINT)
    if len(ends) != count or dtype not in dtypes:
        raise TraceError(
            f"a draw of {kind!r} with {len(ends)} ends and of {dtype} cannot be.", hint=_HINT
        )


def _filled(
    key: AnyKey,
    places: Places,
    kind: str,
    ends: Sequence[float],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    match kind:
        case "uniform":
            low, high = ends
            return filled(key, places, dtype, width_of(dtype), uniform_of(dtype, low, high), device)
        case "normal":
            return filled(key, places, dtype, width_of(dtype), normal_of(dtype), device)
        case "bernoulli":
            (p,) = ends
            unit = uniform_of(torch.float32)
            single = torch.tensor(p, dtype=torch.float32).item()
            return filled(key, places, dtype, 32, lambda bits: unit(bits) < single, device)
        case _:
            width = 64 if dtype == torch.int64 else 32
            return filled(key, places, dtype, width, lambda bits: bits, device)


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
