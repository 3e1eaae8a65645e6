"""`tell_einops`: einops takes a DTensor as it takes a tensor of torch, whose methods it calls.

It asks the subclasses of its backend that are alive whether a tensor is theirs: one for DTensors,
which `tell_einops` keeps, is among them.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from fdtensor.tensors.tensor_like import TensorLike

__all__ = ["tell_einops"]


@functools.cache
def tell_einops() -> object:
    """Adds a backend for DTensors to einops, where that is installed; the backend, or None."""
    try:
        base: Any = importlib.import_module("einops._backends").TorchBackend
    except (ImportError, AttributeError):  # none, or a version that asks in another way
        return None

    class Backend(base):  # type: ignore[misc]
        framework_name = "fdtensor"

        def is_appropriate_type(self, tensor: object) -> bool:
            return isinstance(tensor, TensorLike)

    return Backend
