"""`with_random_key`: a function that draws from a key, as one that takes the key as a tensor."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.random_bits import Key
from fdtensor.ops.random_bits.keys import INTEGERS, words_of
from fdtensor.ops.recorder import draw_from

__all__ = ["is_key", "key_type", "with_random_key"]


def with_random_key(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` with one more argument: a key as a tensor, from which torch's random ops draw in it.

    A function that has an argument `key` of its own is given the tensor too.
    """
    takes = _takes_key(f)

    def drawing(*args: Any, key: torch.Tensor, **kwargs: Any) -> Any:
        draw_from(key)
        return f(*args, key=key, **kwargs) if takes else f(*args, **kwargs)

    functools.update_wrapper(drawing, f, updated=())
    drawing.__dict__[_KEYED] = True
    return drawing


_KEYED = "_draws_from_key"


def is_key(f: Callable[..., Any], key: Any) -> bool:
    """Whether the argument `key` of a call is for random ops to draw from, not for `f` alone.

    Not where `f` comes from `with_random_key`. Raises `FdtensorError` where it is neither.
    """
    if getattr(f, _KEYED, False):
        return False
    kind = key if isinstance(key, torch.Tensor) else getattr(key, "type", key)
    if isinstance(kind, (torch.Tensor, TensorType)):
        fits = tuple(kind.shape) == (2,) and kind.dtype in INTEGERS
    else:
        fits = isinstance(key, Key)
    if not fits and _takes_key(f) is False:
        words_of(key)  # raises, and says why it is no key
    return fits


def key_type(mesh: Mesh) -> TensorType:
    """The type of a key that all ranks of a mesh have."""
    return TensorType((2,), torch.int64, mesh.layout())


def _takes_key(f: Callable[..., Any]) -> bool | None:
    """Whether a function has an argument `key`; None where it has no signature."""
    try:
        return "key" in inspect.signature(f).parameters
    except (ValueError, TypeError):
        return None
