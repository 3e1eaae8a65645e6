"""Private names of torch for functionalization, below which ops write to nothing: 2.11 to 2.13."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "is_functional_tensor",
    "of_functional_tensor",
    "sync",
    "to_functional_tensor",
    "turn_functionalization_off",
    "turn_functionalization_on",
]

_torch: Any = torch

to_functional_tensor: Any = _torch._to_functional_tensor
"""A functional tensor around a tensor, which writes replace instead of changing it."""

of_functional_tensor: Any = _torch._from_functional_tensor
"""The tensor in a functional tensor."""

is_functional_tensor: Any = _torch._is_functional_tensor
"""Whether a tensor is a functional one."""

sync: Any = _torch._sync
"""Brings a functional tensor up to date with writes to its views."""

turn_functionalization_on: Any = _torch._enable_functionalization
"""Lets ops of functional tensors come out as functions, from here on."""

turn_functionalization_off: Any = _torch._disable_functionalization
"""Ends what the function above began."""
