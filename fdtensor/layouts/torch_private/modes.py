"""Private names of torch for modes, fake tensors and the order of dispatch: 2.11 to 2.13."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "FAKES_LOG",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "below_autograd",
    "count_dispatch_modes",
    "count_function_modes",
    "enable_python_dispatcher",
    "extract_tensor_metadata",
    "forget_fakes",
    "function_modes",
    "plain_dispatch",
    "pop_function_mode",
    "profiling",
    "proxy_mode",
    "push_function_mode",
    "without_functions",
    "without_modes",
]

_C: Any = torch._C

function_modes = _get_current_function_mode_stack
"""The stack of `TorchFunctionMode`s of this thread; a default device is one of them."""

count_function_modes: Any = _C._len_torch_function_stack
"""How many there are."""

push_function_mode: Any = _push_mode
"""Enters a `TorchFunctionMode` of another thread."""

pop_function_mode: Any = _pop_mode
"""Leaves the innermost `TorchFunctionMode`."""

count_dispatch_modes: Any = _C._len_torch_dispatch_stack
"""How many `TorchDispatchMode`s of Python surround this code."""

profiling: Any = _C._autograd._profiler_enabled
"""Whether a profiler of torch is at work."""

without_functions: Any = _C.DisableTorchFunction
"""A context in which no `TorchFunctionMode` sees what is called."""

without_modes: Any = _disable_current_modes
"""The context manager in which no mode sees what is called."""

below_autograd: Any = _C._AutoDispatchBelowAutograd
"""A context in which autograd sees nothing of what is called."""

plain_dispatch: Any = _C._disabled_torch_dispatch_impl
"""The `__torch_dispatch__` of a class of tensors that has none of its own."""

extract_tensor_metadata = _extract_tensor_metadata
"""The shape, dtype and strides of a tensor, as nodes of exported graphs have them."""

FAKES_LOG = "torch._subclasses.fake_tensor"
"""The name of the log to which fake tensors write what they raise."""


def forget_fakes(most: int) -> None:
    """Drops what torch keeps of ops on fake tensors, where it is of more than `most` of them."""
    if len(FakeTensorMode.cache) > most:
        FakeTensorMode.cache_clear()


def proxy_mode() -> Any:
    """The mode of `make_fx`, None outside of one."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.PROXY)
