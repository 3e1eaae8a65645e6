"""`filled`: a block of a tensor, made piece by piece of the random bits of its places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from fdtensor.ops.random_bits.keys import AnyKey, recorded, words_of
from fdtensor.ops.random_bits.places import Places
from fdtensor.ops.random_bits.threefry import PIECE, Words, hash_array, hash_tensor

__all__ = ["Convert", "Width", "filled"]

Width = Literal[32, 64]
"""The number of bits of an element."""

Convert = Callable[[torch.Tensor], torch.Tensor]
"""From bits, in int32 or int64, to elements, one by one."""

LARGE_PIECE = 1 << 22
"""The number of elements that a device other than the CPU computes at a time."""

_WORD = 0xFFFFFFFF


def filled(
    key: AnyKey | tuple[AnyKey, ...],
    places: Places,
    dtype: torch.dtype,
    width: Width,
    convert: Convert,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The elements that `convert` makes of the bits of these places; contiguous.

    Of several keys it gets the bits stacked. By default on the device of a key that is a tensor,
    or on the CPU.
    """
    keys = key if isinstance(key, tuple) else (key,)
    tensors = [k for k in keys if isinstance(k, torch.Tensor)]
    device = torch.device(device or (tensors[0].device if tensors else "cpu"))
    words = [words_of(k, device) for k in keys]
    stacked = convert if isinstance(key, tuple) else lambda bits: convert(bits[0])
    if recorded(*tensors):
        numbers = places.tensor(device)
        return stacked(torch.stack([_bits(each, numbers, width) for each in words])).to(dtype)
    out = torch.empty(places.count, dtype=dtype, device=device)
    if device.type == "cpu":
        known = [(int(high) & _WORD, int(low) & _WORD) for high, low in words]
        _fill(out, known, places, width, stacked)
    else:
        _fill_on_device(out, words, places, width, stacked)
    return out.view(places.local_shape)


def _fill(
    out: torch.Tensor,
    words: Sequence[tuple[int, int]],
    places: Places,
    width: Width,
    convert: Convert,
) -> None:
    """On the CPU, by numpy, which has unsigned words and lighter calls."""
    size = min(PIECE, max(1, places.count))
    steps = np.arange(size, dtype=np.uint32)
    buffers = np.empty((3, size), np.uint32)
    bits = np.empty((len(words), size), np.int64 if width == 64 else np.int32)
    done = 0
    for run in places.runs(PIECE):
        count = min(PIECE, out.numel() - done) if isinstance(run, int) else run.size
        x0, x1, spare = buffers[:, :count]
        for key, out_bits in zip(words, bits[:, :count], strict=True):
            if isinstance(run, int) and run >> 32 == (run + count - 1) >> 32:
                x0[:] = run >> 32
                np.add(steps[:count], np.uint32(run & 0xFFFFFFFF), x1)
            else:
                numbers = run + np.arange(count) if isinstance(run, int) else run
                x1[:] = numbers.astype(np.uint32)
                x0[:] = (numbers >> 32).astype(np.uint32) if places.past_32_bits else 0
            hash_array(key, x0, x1, spare)
            if width == 32:
                np.bitwise_xor(x0, x1, out_bits.view(np.uint32))
            else:
                both = out_bits.view(np.uint32).reshape(count, 2)
                both[:, _HIGH] = x0
                both[:, 1 - _HIGH] = x1
        out[done : done + count] = convert(torch.from_numpy(bits[:, :count]))
        done += count


_HIGH = int(np.little_endian)
"""The position of the high word of an int64."""


def _fill_on_device(
    out: torch.Tensor, words: Sequence[Words], places: Places, width: Width, convert: Convert
) -> None:
    """On another device, by torch."""
    done = 0
    for run in places.runs(LARGE_PIECE):
        if isinstance(run, int):
            count = min(LARGE_PIECE, out.numel() - done)
            numbers = torch.arange(run, run + count, device=out.device)
        else:
            count = run.size
            numbers = torch.from_numpy(run).to(out.device)
        bits = [_bits(key, numbers, width) for key in words]
        out[done : done + count] = convert(torch.stack(bits))
        done += count


def _bits(words: Words, numbers: torch.Tensor, width: Width) -> torch.Tensor:
    """The bits of elements with these numbers, in int32 or int64."""
    high, low = hash_tensor(words, (numbers >> 32).to(torch.int32), numbers.to(torch.int32))
    if width == 32:
        return high ^ low
    return (high.to(torch.int64) << 32) | (low.to(torch.int64) & 0xFFFFFFFF)
