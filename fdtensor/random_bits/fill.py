"""`filled`: a block of a tensor, made piece by piece of the random bits of its places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from fdtensor.random_bits.keys import AnyKey, words_of
from fdtensor.random_bits.places import Places
from fdtensor.random_bits.threefry import PIECE, Words, hash_array, hash_tensor

__all__ = ["Convert", "Width", "filled", "recorded"]

Width = Literal[32, 64]
"""How many bits an element takes."""

Convert = Callable[[torch.Tensor], torch.Tensor]
"""From bits, in int32 or int64, to elements, one by one."""

LARGE_PIECE = 1 << 22
"""Elements that another device than the CPU makes at a time."""

_torch: Any = torch  # what torch does not export


def filled(
    key: AnyKey,
    places: Places,
    dtype: torch.dtype,
    width: Width,
    convert: Convert,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The elements that `convert` makes of the bits of these places; contiguous.

    By default on the device of a key that is a tensor, or on the CPU.
    """
    words = words_of(key)
    if device is None:
        device = key.device if isinstance(key, torch.Tensor) else "cpu"
    device = torch.device(device)
    if recorded() or not isinstance(words[0], int):
        return convert(_bits(words, places.tensor(device), width)).to(dtype)
    out = torch.empty(places.count, dtype=dtype, device=device)
    if device.type == "cpu":
        _fill(out, words, places, width, convert)
    else:
        _fill_there(out, words, places, width, convert)
    return out.view(places.local_shape)


def recorded() -> bool:
    """Whether ops are recorded rather than run: then there is one piece, in torch ops."""
    return torch.compiler.is_compiling() or bool(_torch._C._len_torch_dispatch_stack())


def _fill(out: torch.Tensor, words: Any, places: Places, width: Width, convert: Convert) -> None:
    """On the CPU, by numpy, which has unsigned words and lighter calls."""
    size = min(PIECE, max(1, places.count))
    steps = np.arange(size, dtype=np.uint32)
    buffers = np.empty((3, size), np.uint32)
    both = np.empty((size, 2) if width == 64 else (0, 2), np.uint32)
    done = 0
    for run in places.runs(PIECE):
        count = min(PIECE, out.numel() - done) if isinstance(run, int) else run.size
        x0, x1, spare = buffers[:, :count]
        if isinstance(run, int) and run >> 32 == (run + count - 1) >> 32:
            x0[:] = run >> 32
            np.add(steps[:count], np.uint32(run & 0xFFFFFFFF), x1)
        else:
            numbers = run + np.arange(count) if isinstance(run, int) else run
            x1[:] = numbers.astype(np.uint32)
            x0[:] = (numbers >> 32).astype(np.uint32) if places.past_32_bits else 0
        hash_array(words, x0, x1, spare)
        if width == 32:
            x0 ^= x1
            bits = torch.from_numpy(x0.view(np.int32))
        else:
            both[:count, _HIGH] = x0
            both[:count, 1 - _HIGH] = x1
            bits = torch.from_numpy(both[:count].view(np.int64).reshape(-1))
        out[done : done + count] = convert(bits)
        done += count


_HIGH = int(np.little_endian)
"""Where the high word of an int64 is."""


def _fill_there(
    out: torch.Tensor, words: Words, places: Places, width: Width, convert: Convert
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
        out[done : done + count] = convert(_bits(words, numbers, width))
        done += count


def _bits(words: Words, numbers: torch.Tensor, width: Width) -> torch.Tensor:
    """The bits of elements with these numbers, in int32 or int64."""
    high, low = hash_tensor(words, (numbers >> 32).to(torch.int32), numbers.to(torch.int32))
    if width == 32:
        return high ^ low
    return (high.to(torch.int64) << 32) | (low.to(torch.int64) & 0xFFFFFFFF)
