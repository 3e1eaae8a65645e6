"""`keyed`: a function whose random ops draw from a key, as one that takes the key too."""

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

__all__ = ["is_key", "key_type", "keyed"]


def keyed(f: Callable[..., Any]) -> Callable[..., Any]:
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
    """Whether what `f` is given as `key` is to draw from, rather than just an argument of `f`.

    Not where `f` was made by `keyed`. Raises `FdtensorError` where it is neither.
    """
    if getattr(f, _KEYED, False):
        return False
    kind = key if isinstance(key, torch.Tensor) else getattr(key, "type", key)
    if isinstance(kind, (torch.Tensor, TensorType)):
        found = tuple(kind.shape) == (2,) and kind.dtype in INTEGERS
    else:
        found = isinstance(key, Key)
    if not found and _takes_key(f) is False:
        words_of(key)  # says what is wrong
    return found


def key_type(mesh: Mesh) -> TensorType:
    """The type of a key that all ranks of a mesh have."""
    return TensorType((2,), torch.int64, mesh.layout())


def _takes_key(f: Callable[..., Any]) -> bool | None:
    """Whether a function has an argument `key`; None where nobody says."""
    try:
        return "key" in inspect.signature(f).parameters
    except (ValueError, TypeError):
        return None
