"""Private names of torch for settings: autocast, determinism, precision, oneDNN: 2.11 to 2.13."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch.distributions import Distribution

__all__ = [
    "autocast_devices",
    "autocasting",
    "deterministic",
    "deterministic_warns",
    "onednn_enabled",
    "precision_of_products",
    "set_deterministic",
    "set_onednn_enabled",
    "without_autocast",
    "without_validation",
]

_C: Any = torch._C

autocasting: Any = _C._is_any_autocast_enabled
"""Whether ops are cast, on any kind of device."""

without_autocast: Any = _C._DisableAutocast
"""A context in which no op is cast."""

autocast_devices: Any = _C._autocast_supported_devices
"""The kinds of device that have autocast."""

deterministic: Any = _C._get_deterministic_algorithms
"""Whether ops must give the same numbers each time."""

deterministic_warns: Any = _C._get_deterministic_algorithms_warn_only
"""Whether those that cannot only warn."""

set_deterministic: Any = _C._set_deterministic_algorithms
"""Sets both."""

precision_of_products: Any = _C._get_float32_matmul_precision
"""How exact products of float32 are: `highest`, `high` or `medium`."""

onednn_enabled: Any = _C._get_mkldnn_enabled
"""Whether CPU kernels are those of oneDNN where it has them."""

set_onednn_enabled: Any = _C._set_mkldnn_enabled
"""Sets it."""


@contextlib.contextmanager
def without_validation() -> Generator[None]:
    """A context in which distributions look at no values, but where `validate_args=True` is said.

    It is for all threads, as the setting of torch is.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
