"""`filled`: a block of a tensor, made piece by piece of the random bits of its places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from fdtensor.ops.random_bits.keys import AnyKey, Key, recorded, words_of
from fdtensor.ops.random_bits.places import Places
from fdtensor.ops.random_bits.threefry import PIECE, RECORDING, Words, hash_array, hash_tensor

__all__ = ["Convert", "Law", "Width", "filled", "filled_by_each"]

Width = Literal[32, 64]
"""The number of bits of an element."""

Convert = Callable[[torch.Tensor], torch.Tensor]
"""From bits, in int32 or int64, to elements, one by one."""

Law = tuple[str, tuple[float, ...]]
"""The kind and ends of a draw that is known as an op."""

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
    law: Law | None = None,
) -> torch.Tensor:
    """The elements that `convert` makes of the bits of these places; contiguous.

    Of several keys it gets the bits stacked. By default on the device of a key that is a tensor,
    or on the CPU. A function of ours that is recorded has one op for the bits, or for the elements
    where their `law` is given.
    """
    keys = key if isinstance(key, tuple) else (key,)
    tensors = [k for k in keys if isinstance(k, torch.Tensor)]
    device = torch.device(device or (tensors[0].device if tensors else "cpu"))
    words = [words_of(k, device) for k in keys]
    stacked = convert if isinstance(key, tuple) else lambda bits: convert(bits[0])
    if recorded(*tensors):
        if not torch.compiler.is_dynamo_compiling() and RECORDING and places.is_whole:
            held = [k.tensor(device) if isinstance(k, Key) else k.to(device) for k in keys]
            return _drawn(held, places, dtype, width, stacked, law)
        numbers = places.tensor(device)
        return stacked(torch.stack([_bits(each, numbers, width) for each in words])).to(dtype)
    out = torch.empty(places.count, dtype=dtype, device=device)
    if device.type == "cpu":
        known = [(int(high) & _WORD, int(low) & _WORD) for high, low in words]
        _fill(out, known, places, width, stacked)
    else:
        _fill_on_device(out, words, places, width, stacked)
    return out.view(places.local_shape)


def _drawn(
    keys: Sequence[torch.Tensor],
    places: Places,
    dtype: torch.dtype,
    width: Width,
    convert: Convert,
    law: Law | None,
) -> torch.Tensor:
    """The elements as an op, or as ops of the bits."""
    if law is not None:
        return RECORDING[-1](keys[0], *law, places, dtype)
    kept = torch.int64 if width == 64 else torch.int32
    bits = [RECORDING[-1](key, "bits", (), places, kept) for key in keys]
    return convert(torch.stack(bits)).to(dtype)


def filled_by_each(
    keys: torch.Tensor, places: Places, dtype: torch.dtype, width: Width, convert: Convert
) -> torch.Tensor:
    """The elements by each of the keys, of shape (..., 2); few elements for many keys at once."""
    out = torch.empty((keys.shape[:-1].numel(), places.count), dtype=dtype, device=keys.device)
    flat, many = keys.reshape(-1, 2), max(1, PIECE // max(1, places.count))
    numbers = places.tensor(keys.device).reshape(-1) if many > 1 else None
    for start in range(0, len(out), many):
        if numbers is None:
            one: Any = flat[start]
            if keys.device.type == "cpu":
                one = Key(*[word & _WORD for word in one.tolist()])
            out[start] = filled(one, places, dtype, width, convert, keys.device).view(-1)
        else:
            words = flat[start : start + many].to(torch.int64).to(torch.int32).unsqueeze(-1)
            bits = _bits((words[:, 0], words[:, 1]), numbers, width)
            out[start : start + many] = convert(bits).to(dtype)
    return out.view(*keys.shape[:-1], *places.local_shape)


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
