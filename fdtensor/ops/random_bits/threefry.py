"""Threefry-2x32 with 20 rounds: two words of 32 bits from a key and a counter, by the index.

Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". Once for numpy,
in place and in pieces that fit the cache, and once in torch ops that any device and tracer takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fdtensor.ops.random_bits.opaque import compiled, opaque

__all__ = [
    "HASH",
    "PIECE",
    "RECORDING",
    "Words",
    "hash_array",
    "hash_ints",
    "hash_tensor",
    "signed",
]

Words = tuple[int, int] | tuple[torch.Tensor, torch.Tensor]
"""A key: two ints of 32 bits, or two 0-d int32 tensors with these bits."""

PIECE = 65536
"""The number of counters hashed at a time: their buffers stay in the second-level cache."""

RECORDING: list[Any] = []
"""What draws by a key as one op, for each function of ours that is recorded: the innermost last."""

_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_MASK = 0xFFFFFFFF

Array = np.ndarray


def signed(word: int) -> int:
    """The int32 with the bits of a word."""
    word &= _MASK
    return word - (1 << 32) if word >> 31 else word


def hash_ints(words: tuple[int, int], high: int, low: int) -> tuple[int, int]:
    """Both words for one counter."""
    keys = (words[0], words[1], words[0] ^ words[1] ^ _PARITY)
    x0, x1 = (high + keys[0]) & _MASK, (low + keys[1]) & _MASK
    for i in range(5):
        for turn in _ROTATIONS[i % 2]:
            x0 = (x0 + x1) & _MASK
            x1 = ((x1 << turn | x1 >> (32 - turn)) & _MASK) ^ x0
        x0 = (x0 + keys[(i + 1) % 3]) & _MASK
        x1 = (x1 + keys[(i + 2) % 3] + i + 1) & _MASK
    return x0, x1


def hash_array(
    words: tuple[int, int] | tuple[Array, Array], x0: Array, x1: Array, spare: Array
) -> None:
    """Replaces counters, high and low words in uint32, by their hashes; `spare` is of their size.

    In a round `x0 += x1`, then `x1` is rotated, and `x0` is added to it bit by bit.
    """
    parts = (*words, words[0] ^ words[1] ^ _PARITY)
    keys = [np.asarray(part, np.uint32).reshape(-1) for part in parts]
    x0 += keys[0]
    x1 += keys[1]
    for i in range(5):
        for turn in _ROTATIONS[i % 2]:
            x0 += x1
            np.left_shift(x1, np.uint32(turn), spare)
            np.right_shift(x1, np.uint32(32 - turn), x1)
            x1 |= spare
            x1 ^= x0
        x0 += keys[(i + 1) % 3]
        x1 += keys[(i + 2) % 3] + np.uint32(i + 1)


def hash_tensor(
    words: Words, high: torch.Tensor, low: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both words for counters, as int32 tensors with these bits.

    Recorded by us, or compiled for the CPU, it is one op: a compiler reads the rounds for half a
    minute.
    """
    compiling = torch.compiler.is_dynamo_compiling()
    if (compiled() and high.device.type == "cpu") or (not compiling and RECORDING):
        keys = [
            torch.full((), signed(word), dtype=torch.int32, device=high.device)
            if isinstance(word, int)
            else word
            for word in words
        ]
        return HASH(*keys, high, low)
    return _rounds(words, high, low)


def _rounds(
    words: Words, high: torch.Tensor, low: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both words by torch."""
    first, second = words
    if isinstance(first, int) and isinstance(second, int):
        third = signed(first ^ second ^ _PARITY)
        first, second = signed(first), signed(second)
    else:
        third = first ^ second ^ _PARITY
    keys = (first, second, third)
    x0, x1 = high + keys[0], low + keys[1]
    for i in range(5):
        for turn in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << turn) | ((x1 >> (32 - turn)) & ((1 << turn) - 1)))
        x0 = x0 + keys[(i + 1) % 3]
        x1 = x1 + keys[(i + 2) % 3] + (i + 1)
    return x0, x1


@opaque("threefry", 4, outs=2)
def _hash(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By numpy on the CPU, for int32 tensors: the key's words, and the counters'."""
    if tensors[0].device.type != "cpu":
        return _rounds((tensors[0], tensors[1]), *tensors[2:])
    shape = torch.broadcast_shapes(*[x.shape for x in tensors])
    first, second, high, low = (x.numpy().view(np.uint32) for x in tensors)
    x0, x1 = (np.array(np.broadcast_to(x, shape)).reshape(-1) for x in (high, low))
    if first.size == second.size == 1:
        words = int(first.item()), int(second.item())
        spare = np.empty(min(PIECE, x0.size), np.uint32)
        for start in range(0, x0.size, PIECE):
            x0_, x1_ = x0[start : start + PIECE], x1[start : start + PIECE]
            hash_array(words, x0_, x1_, spare[: x0_.size])
    else:
        keys = [np.broadcast_to(x, shape).reshape(-1) for x in (first, second)]
        hash_array((keys[0], keys[1]), x0, x1, np.empty_like(x0))
    first_word, second_word = (torch.from_numpy(x.view(np.int32)).view(shape) for x in (x0, x1))
    return first_word, second_word


HASH = torch.ops.fdtensor.threefry.default
"""Both words for counters, as an op: of the two words of a key, and the high and low words."""
