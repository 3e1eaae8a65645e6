"""`Drawing`: a mode in which functions run, unrecorded, with random numbers from a key."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import torch

from fdtensor.layouts.torch_private import TorchDispatchMode, uncompiled
from fdtensor.ops.randomness.numbers import Numbers
from fdtensor.ops.randomness.of_torch import replacement
from fdtensor.ops.randomness.refusal import is_quiet, refuse_numbers, refuse_random
from fdtensor.ops.randomness.truncated import without_rejection
from fdtensor.ops.value_checks import refuse_out_of_range

__all__ = ["Drawing"]

aten = torch.ops.aten

_FUNCTIONS = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    aten.cauchy_.default: aten.cauchy.default,
    aten.exponential_.default: aten.exponential.default,
    aten.geometric_.default: aten.geometric.default,
    aten.log_normal_.default: aten.log_normal.default,
    aten.normal_.default: aten.normal_functional.default,
    aten.random_.default: aten.random.default,
    aten.random_.to: aten.random.to,
    getattr(aten.random_, "from"): getattr(aten.random, "from"),
    aten.rrelu_with_noise.default: aten.rrelu_with_noise_functional.default,
    aten.uniform_.default: aten.uniform.default,
}
"""Ops that write numbers in place, and those that return the same numbers."""


@uncompiled
class Drawing(TorchDispatchMode):
    """Replaces torch's random ops by draws from a key, as in recorded functions.

    `recorder.draw_from` sets the key; without one random ops are refused.
    """

    def __enter__(self) -> Any:
        self.numbers = Numbers()
        with ExitStack() as stack:
            stack.enter_context(self.numbers)
            stack.enter_context(without_rejection())
            entered = super().__enter__()
            self.contexts = stack.pop_all()
        return entered

    def __exit__(self, *exc: Any) -> Any:
        try:
            return super().__exit__(*exc)
        finally:
            self.contexts.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        functional = _FUNCTIONS.get(func, func)
        drawn = replacement(functional)
        if drawn is None or is_quiet(func, args):
            refuse_random(func, args)
            return func(*args, **kwargs)
        refuse_numbers(functional, args, func)
        refuse_out_of_range(functional, args)
        out = drawn(functools.partial(self.numbers.draw, func), *args, **kwargs)
        if func is aten.rrelu_with_noise.default:
            args[1].copy_(out[1])
            return out[0]
        return args[0].copy_(out) if func in _FUNCTIONS else out
