"""Keys that are DTensors: what is drawn by one is a DTensor, as any op of it gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.random_bits import keys
from fdtensor.ops.random_bits.keys import AnyKey
from fdtensor.tensors.call import call
from fdtensor.tensors.dtensor import DTensor

__all__ = ["fold_in", "keyed", "split"]

F = TypeVar("F", bound=Callable[..., Any])


def keyed(draw: F) -> F:
    """The draw, recorded as an op where its key is a DTensor: so `fd.vmap` goes over keys."""

    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        key = args[0] if args else kwargs.get("key")
        if not isinstance(key, DTensor):
            return draw(*args, **kwargs)
        if any(isinstance(x, TensorType) for x in (*args, *kwargs.values())):
            raise FdtensorError(
                "the type of a DTensor is drawn by a key that every rank has.",
                key=key,
                hint="Pass key.full(), or a plain shape: the result is a DTensor then.",
            )
        return call(draw, *args, **kwargs)

    return cast(F, drawn)


@keyed
@functools.wraps(keys.split)
def split(key: AnyKey, num: int = 2) -> Any:
    return keys.split(key, num)


@functools.wraps(keys.fold_in)
def fold_in(key: AnyKey, data: int | torch.Tensor) -> Any:
    if not isinstance(key, DTensor):
        return keys.fold_in(key, data)
    if not isinstance(data, (torch.Tensor, DTensor)):
        keys.fold_in(keys.Key(0, 0), data)  # raises for what is no number
        data = torch.tensor(data)  # so that one recording serves all steps
    return call(keys.fold_in, key, data, plain="replicate")
