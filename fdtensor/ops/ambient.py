"""The global settings of torch, such as the default dtype or autocast, as one key or as by default.

A traced function runs under those of its caller, which are a part of the key of its program. In the
program all that follows from them is written out: its lines run without autocast, and rules and
decompositions are recorded under the settings of a fresh process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fdtensor.ops.line_checks import debugging

__all__ = [
    "Ambient",
    "ambient",
    "autocasting",
    "neutral",
    "settings",
    "unusual",
    "without_autocast",
]

Ambient = tuple[Any, ...]
"""Settings as a key: equal ones give the same trace."""

_C: Any = torch._C

autocasting = _C._is_any_autocast_enabled
"""Whether ops are cast, on any kind of device."""

without_autocast = _C._DisableAutocast
"""A context in which no op is cast."""

_dtype, _grad, _inference = (
    torch.get_default_dtype,
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
)
_deterministic, _precision = _C._get_deterministic_algorithms, _C._get_float32_matmul_precision
_function_modes = _C._len_torch_function_stack


def ambient() -> Ambient:
    """All settings that a function of tensors, or a library that it calls, may read."""
    return (*settings(), *(_rare() if unusual() else ()))


def settings() -> Ambient:
    """The settings that always have a value, and whether runs check lines; in a microsecond."""
    return _dtype(), _grad(), _inference(), _deterministic(), _precision(), debugging()


def unusual() -> bool:
    """Whether there are settings beside those of `settings`: autocast, a default device."""
    return autocasting() or _function_modes() > 0


def _rare() -> Ambient:
    kinds = _C._autocast_supported_devices()
    casts = [
        (kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)
    ]
    return torch.get_default_device(), tuple(casts)


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    """A context with the settings of a fresh process, instead of those of the caller."""
    dtype, deterministic = _dtype(), _deterministic()
    warn_only = _C._get_deterministic_algorithms_warn_only()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if autocasting():
            stack.enter_context(without_autocast())
        if _function_modes():
            stack.enter_context(torch.device("cpu"))
        if dtype is not torch.float32:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        if deterministic:
            stack.callback(_C._set_deterministic_algorithms, True, warn_only=warn_only)
            _C._set_deterministic_algorithms(False)
        yield
