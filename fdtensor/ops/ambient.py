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

from fdtensor.layouts.torch_private import (
    autocast_devices,
    autocasting,
    count_function_modes,
    deterministic,
    deterministic_warns,
    precision_of_products,
    set_deterministic,
    without_autocast,
)
from fdtensor.ops.line_checks import debugging

__all__ = [
    "Ambient",
    "ambient",
    "autocasting",
    "casts",
    "neutral",
    "restored",
    "settings",
    "unusual",
    "with_casts",
    "without_autocast",
]

Ambient = tuple[Any, ...]
"""Settings as a key: equal ones give the same trace."""

_dtype, _grad, _inference = (
    torch.get_default_dtype,
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
)


def ambient() -> Ambient:
    """All settings that a function of tensors, or a library that it calls, may read."""
    return (*settings(), *(_rare() if unusual() else ()))


def settings() -> Ambient:
    """The settings that always have a value, and whether runs check lines; in a microsecond."""
    return _dtype(), _grad(), _inference(), deterministic(), precision_of_products(), debugging()


def unusual() -> bool:
    """Whether there are settings beside those of `settings`: autocast, a default device."""
    return autocasting() or count_function_modes() > 0


def _rare() -> Ambient:
    return torch.get_default_device(), casts()


Casts = tuple[tuple[str, torch.dtype], ...]
"""The kinds of device on which autocast is on, each with the dtype to which it casts."""


def casts() -> Casts:
    """How ops are cast now."""
    kinds = autocast_devices() if autocasting() else ()
    on = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    return tuple([(kind, torch.get_autocast_dtype(kind)) for kind in on])


@contextlib.contextmanager
def with_casts(casts: Casts) -> Iterator[None]:
    """A context in which ops are cast so, and not as around it."""
    with contextlib.ExitStack() as stack:
        if autocasting():
            stack.enter_context(without_autocast())
        for kind, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
        yield


def neutral() -> contextlib.AbstractContextManager[None]:
    """A context with the settings of a fresh process, instead of those of the caller."""
    return _under(torch.float32, False, torch.device("cpu"), ())


def restored(known: Ambient) -> contextlib.AbstractContextManager[None]:
    """A context with settings as `ambient` gave them, but for the grad mode, which is on."""
    dtype, _, _, exact, _, _, *rare = known
    device, casts = rare or (torch.device("cpu"), ())
    return _under(dtype, exact, device, casts)


@contextlib.contextmanager
def _under(dtype: torch.dtype, exact: bool, device: torch.device, casts: Casts) -> Iterator[None]:
    """A context with these settings: the default dtype, determinism, default device, autocast."""
    before, exact_before, warn_only = _dtype(), deterministic(), deterministic_warns()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if autocasting() or casts:
            stack.enter_context(with_casts(casts))
        if count_function_modes() or device.type != "cpu":
            stack.enter_context(device)
        if before is not dtype:
            stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(dtype)
        if exact_before != exact:
            stack.callback(set_deterministic, exact_before, warn_only=warn_only)
            set_deterministic(exact)
        yield
