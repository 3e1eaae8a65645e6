"""All private names of torch that this package uses, each under a public name of ours.

pyproject allows torch 2.11 to 2.13, and each name is in all of these; where a later version moves
one, this is the file to change. `tests/layouts/test_torch_private.py` resolves them all, and fails
where another file uses a private name.
"""

# pyright: reportPrivateUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
from collections.abc import Generator, MutableMapping
from importlib import import_module
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import eager_transforms
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _OpNamespace
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.optim import _muon
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "FOREACH",
    "NEWTON_SCHULZ",
    "NO_GROUPS",
    "RESETS",
    "ConvNd",
    "ConvTransposeNd",
    "CustomOpDef",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpNamespace",
    "OpOverload",
    "OpOverloadPacket",
    "ScalerWithHook",
    "abstract_function",
    "as_if_compiling",
    "backward_function",
    "c10d_group",
    "dtensor_spec_module",
    "enable_python_dispatcher",
    "extract_tensor_metadata",
    "foreach_mul_",
    "foreach_norm",
    "forward_grad_enabled",
    "forward_hooks",
    "forward_level",
    "function_modes",
    "has_init_group",
    "has_kernel",
    "init_group",
    "is_functorch_wrapped_tensor",
    "jit_overload",
    "lazy_clone",
    "local_tensor_of",
    "make_uncompiled",
    "module_tensors",
    "nested_jvp",
    "newton_schulz",
    "op_function",
    "overload_in",
    "packet_name",
    "pop_function_mode",
    "push_function_mode",
    "qualified_name",
    "schema_of",
    "set_forward_grad_enabled",
    "setup_context_function",
    "spec_of",
    "strided_shard",
    "torch_pytree",
    "transforms_active",
    "version_of",
    "without_modes",
]

_torch: Any = torch

# --- transforms of torch.func and forward AD: 2.11 to 2.13 -----------------------------------

transforms_active: Any = _torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` surrounds this code."""

forward_grad_enabled: Any = _torch._C._is_fwd_grad_enabled
"""Whether forward AD is on in this thread."""

set_forward_grad_enabled: Any = forward_ad._set_fwd_grad_enabled
"""The context manager that turns forward AD on or off in this thread."""


def forward_level() -> int:
    """The current level of forward AD, which all threads share; -1 outside of all levels."""
    return forward_ad._current_level


@contextlib.contextmanager
def nested_jvp() -> Generator[None]:
    """Lets every `torch.func.jvp` within find itself nested, so that none ends the shared level."""
    eager_transforms.JVP_NESTING += 1
    try:
        yield
    finally:
        eager_transforms.JVP_NESTING -= 1


# --- torch.compile: 2.11 to 2.13 -------------------------------------------------------------

_eval_frame: Any = eval_frame
_SKIP = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def make_uncompiled(f: Any) -> None:
    """Lets `torch.compile` compile neither this function nor what it calls."""
    f.__dict__["_torchdynamo_disable"] = True
    _eval_frame.set_code_exec_strategy(f.__code__, _SKIP)


@contextlib.contextmanager
def as_if_compiling() -> Generator[None]:
    """Lets the optimizers of torch keep numbers that are tensors, as they do when compiled."""
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag
    compiler._is_compiling_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag = before


# --- modes and fake tensors: 2.11 to 2.13 ----------------------------------------------------

function_modes = _get_current_function_mode_stack
"""The stack of `TorchFunctionMode`s of this thread; a default device is one of them."""

push_function_mode = _push_mode
"""Enters a `TorchFunctionMode` of another thread."""

pop_function_mode = _pop_mode
"""Leaves the innermost `TorchFunctionMode`."""

without_modes: Any = _disable_current_modes
"""The context manager in which no mode sees what is called."""

extract_tensor_metadata = _extract_tensor_metadata
"""The shape, dtype and strides of a tensor, as nodes of exported graphs have them."""

# --- ops: 2.11 to 2.13 -----------------------------------------------------------------------

OpNamespace = _OpNamespace
"""The class of `torch.ops.aten` and other namespaces of ops."""

FOREACH = "_foreach_"
"""The prefix of functions that do the same to each tensor of a list."""

foreach_norm: Any = _torch._foreach_norm
"""The norm of each tensor of a list, in few kernels."""

foreach_mul_: Any = _torch._foreach_mul_
"""Multiplies each tensor of a list in place, in few kernels."""


has_kernel: Any = _torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether an op, by its name, has a kernel of its own for a dispatch key, by its name."""


def schema_of(op: OpOverload) -> Any:
    """The schema of an op: its arguments and what it returns."""
    return op._schema


def packet_name(op: OpOverload) -> str:
    """The name of an op without its namespace and overload: `add`."""
    return op._opname


def qualified_name(packet: OpOverloadPacket) -> str:
    """The name of an op with its namespace: `aten::add`."""
    return packet._qualified_op_name


def jit_overload(packet: OpOverloadPacket, args: Any, kwargs: Any) -> str:
    """The name of the overload that a call with these arguments means; empty for the default."""
    return _torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)


def overload_in(op: Any) -> Any:
    """The overload of a `CustomOpDef`; anything else as it is."""
    return getattr(op, "_opoverload", op)


def op_function(op: CustomOpDef) -> Any:
    """The function that a custom op was defined by."""
    return op._init_fn


def abstract_function(op: CustomOpDef) -> Any:
    """The function that was registered for fake tensors, or None."""
    return op._abstract_fn


def backward_function(op: CustomOpDef) -> Any:
    """The function that was registered as the backward, or None."""
    return op._backward_fn


def setup_context_function(op: CustomOpDef) -> Any:
    """The function that saves tensors for the backward, or None."""
    return op._setup_context_fn


# --- tensors and modules: 2.11 to 2.13 -------------------------------------------------------

torch_pytree = _pytree
"""The pytrees of torch, by which exported programs are called."""

ConvNd = _ConvNd
"""The base of all convolutions."""

ConvTransposeNd = _ConvTransposeNd
"""The base of all transposed convolutions."""

RESETS = ("reset_parameters", "_reset_parameters")
"""The methods by which modules draw their parameters; `MultiheadAttention` has the second."""


lazy_clone: Any = _torch._lazy_clone
"""A clone that shares its memory with the tensor until one of the two is written to."""


def version_of(tensor: torch.Tensor) -> int:
    """The number of times that a tensor, or another view of its memory, was written to."""
    return tensor._version


def module_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and the buffers that a module itself has, None for those left out."""
    return module._parameters, module._buffers


def forward_hooks(module: torch.nn.Module) -> tuple[list[MutableMapping[int, Any]], ...]:
    """The hooks before and after a forward by number, and what is known of them by number."""
    return (
        [module._forward_pre_hooks, module._forward_hooks],
        [module._forward_pre_hooks_with_kwargs, module._forward_hooks_always_called],
    )


# --- optimizers: 2.11 to 2.13 ----------------------------------------------------------------

NEWTON_SCHULZ = "_zeropower_via_newtonschulz"
"""The name of the function below in the module of `torch.optim.Muon`."""

newton_schulz: Any = getattr(_muon, NEWTON_SCHULZ)
"""About the nearest orthogonal matrix, by the iteration of Newton and Schulz."""


def has_init_group(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer can make its state without a step."""
    return hasattr(kind, "_init_group")


def init_group(optimizer: Any) -> Any:
    """The method of an optimizer that makes the state of a group of parameters."""
    return optimizer._init_group


class ScalerWithHook(torch.amp.GradScaler):
    """`torch.amp.GradScaler` with a public name for what it does to gradients before a step."""

    def unscaled(self, flags: dict[torch.device, torch.Tensor]) -> dict[torch.device, torch.Tensor]:
        """The flags, by device, that say whether a gradient is infinite or nan."""
        return flags

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        return self.unscaled(super()._unscale_grads_(*args, **kwargs))


# --- torch.distributed, which is imported when it is first asked for: 2.11 to 2.13 -----------

NO_GROUPS: dict[str, Any] = {"_init_backend": False}
"""The argument that lets a DeviceMesh make no process groups, as on a rank outside of it."""


def c10d_group(name: str) -> Any:
    """The process group of this name."""
    return _torch._C._distributed_c10d._resolve_process_group(name)


def strided_shard() -> Any:
    """torch's placement for a dim that is cut into blocks first: the class `_StridedShard`."""
    return import_module("torch.distributed.tensor.placement_types")._StridedShard


def dtensor_spec_module() -> Any:
    """The module that defines `DTensorSpec` and `TensorMeta`."""
    return import_module("torch.distributed.tensor._dtensor_spec")


def spec_of(dtensor: Any) -> Any:
    """The `DTensorSpec` of a torch DTensor: mesh, placements and how they are read."""
    return dtensor._spec


def local_tensor_of(dtensor: Any) -> torch.Tensor:
    """The local tensor of a torch DTensor, outside of autograd."""
    return dtensor._local_tensor
