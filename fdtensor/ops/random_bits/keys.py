"""`Key`: the key of random numbers, as a value; `key`, `split` and `fold_in` make keys."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import torch

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.record import integer, natural
from fdtensor.layouts.torch_private import count_dispatch_modes, is_functorch_wrapped_tensor
from fdtensor.layouts.tree import register_value
from fdtensor.ops.random_bits.threefry import Words, hash_ints, hash_tensor

__all__ = ["INTEGERS", "AnyKey", "Key", "fold_in", "key", "recorded", "split", "words_of"]

INTEGERS = (torch.int64, torch.int32, torch.uint32, torch.uint64)
"""The dtypes in which a tensor may hold the words of a key."""
_WORD = 0xFFFFFFFF


def recorded(*tensors: torch.Tensor) -> bool:
    """Whether ops are recorded rather than run, or some of these tensors stand for others."""
    if torch.compiler.is_compiling() or count_dispatch_modes():
        return True
    return any(type(x) is not torch.Tensor or is_functorch_wrapped_tensor(x) for x in tensors)


def _check_word(word: Any) -> None:
    if not isinstance(word, int) or not 0 <= word <= _WORD:
        raise FdtensorError(
            f"{word!r} is not a word of a key.",
            hint="Make keys by random.key(seed), split and fold_in.",
        )


@dataclasses.dataclass(frozen=True)  # torch.compile makes no frozen ones of attrs
class Key:
    """The key of random numbers: 64 bits, as two words. Hashable; equal keys give equal numbers.

    A key that is used twice gives the same numbers twice: `split` it for others.

    >>> isinstance(fd.random.key(0), fd.random.Key)
    True
    """

    high: int
    low: int

    def __post_init__(self) -> None:
        _check_word(self.high)
        _check_word(self.low)

    def tensor(self, device: str | torch.device | None = None) -> torch.Tensor:
        """The words as an int64 tensor of shape (2,), which serves as a key everywhere."""
        return torch.tensor((self.high, self.low), dtype=torch.int64, device=device)


register_value(Key)

AnyKey: TypeAlias = Key | torch.Tensor
"""A key, or its two words as an integer tensor of shape (2,), which a traced function may take."""


def words_of(key: AnyKey, device: torch.device | None = None) -> Words:
    """The words of a key, those of a tensor on this device; raises `FdtensorError` for no key."""
    if isinstance(key, Key):
        return key.high, key.low
    if not isinstance(key, torch.Tensor):
        raise FdtensorError(
            f"{key!r} is not a key.", hint="Make one: random.key(seed); a seed is an int."
        )
    if tuple(key.shape) != (2,) or key.dtype not in INTEGERS:
        raise FdtensorError(
            f"a tensor of shape {tuple(key.shape)} and {key.dtype} is not a key.",
            hint="Pass random.key(seed), or its .tensor(): two words in int64, of shape (2,).",
        )
    words = key.to(device, torch.int64).to(torch.int32)
    return words[0], words[1]


def key(seed: int) -> Key:
    """The key of a seed, from -2**63 to 2**64 - 1: the one that JAX makes of it.

    >>> fd.random.key(7)
    Key(high=0, low=7)
    """
    try:
        number = integer(seed)
    except (TypeError, AttributeError):
        raise FdtensorError(
            f"{seed!r} is not a seed.", hint="Pass an int: random.key(0)."
        ) from None
    if not -(1 << 63) <= number < 1 << 64:
        raise FdtensorError(
            f"the seed {number} has more than 64 bits.",
            hint="Pass an int from -2**63 to 2**64 - 1.",
        )
    return Key(number >> 32 & _WORD, number & _WORD)


def split(key: AnyKey, num: int = 2) -> Any:
    """`num` new keys: a tuple of them; of a key in a tensor, a tensor of shape (num, 2).

    >>> first, second = fd.random.split(fd.random.key(0))
    >>> fd.random.uniform(first, (2,)), fd.random.uniform(second, (2,))
    (tensor([0.8423, 0.1824]), tensor([0.0073, 0.0209]))
    """
    words = words_of(key)
    count = natural(num)
    if count is None or count >> 31:
        raise FdtensorError(
            f"a key cannot be split into num={num!r}.",
            hint="Pass how many keys you need, an int below 2**31.",
        )
    if isinstance(key, Key):
        return tuple([Key(*hash_ints((key.high, key.low), 0, i)) for i in range(count)])
    low = torch.arange(count, dtype=torch.int32, device=key.device)
    return _tensor(*hash_tensor(words, torch.zeros_like(low), low))


def fold_in(key: AnyKey, data: int | torch.Tensor) -> Any:
    """The key for a number, such as that of a step: an int from 0 to 2**32 - 1.

    Where the key is a tensor, `data` may be a 0-d integer tensor, and the result is a tensor.

    >>> step = fd.random.fold_in(fd.random.key(0), 3)
    >>> fd.random.uniform(step, (2,))
    tensor([0.2670, 0.7340])
    """
    words = words_of(key)
    if isinstance(data, torch.Tensor):
        if data.dim() or data.dtype.is_floating_point or isinstance(key, Key):
            raise FdtensorError(
                f"a tensor of shape {tuple(data.shape)} and {data.dtype} cannot be folded into "
                f"this {type(key).__name__}.",
                hint="Pass an int, or a 0-d integer tensor and the key as a tensor: key.tensor().",
            )
        low = data.to(torch.int64).to(torch.int32)
        return _tensor(*hash_tensor(words, torch.zeros_like(low), low))
    number = natural(data)
    if number is None or number > _WORD:
        raise FdtensorError(
            f"{data!r} cannot be folded into a key.", hint="Pass an int from 0 to 2**32 - 1."
        )
    if isinstance(key, Key):
        return Key(*hash_ints((key.high, key.low), 0, number))
    low = torch.full((), number, dtype=torch.int64, device=key.device).to(torch.int32)
    return _tensor(*hash_tensor(words, torch.zeros_like(low), low))


def _tensor(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    return torch.stack((high, low), -1).to(torch.int64) & _WORD
