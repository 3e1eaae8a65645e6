"""Private names of torch for tensors, modules and pytrees: 2.11 to 2.13."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, MutableMapping
from operator import attrgetter
from typing import Any

import torch
from torch.nn import init
from torch.nn.modules import module as _modules
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils import _pytree

__all__ = [
    "OF_PARAMETERS",
    "RESETS",
    "ConvNd",
    "ConvTransposeNd",
    "forward_hooks",
    "lazy_clone",
    "call_of_modules",
    "module_hooks",
    "module_tensors",
    "module_values",
    "only_one_holds",
    "storage_number",
    "torch_pytree",
    "truncated_normal_by",
    "version_of",
]

torch_pytree = _pytree
"""The pytrees of torch, by which exported programs are called."""

_torch: Any = torch

lazy_clone: Any = _torch._lazy_clone
"""A clone that shares its memory with the tensor until one of the two is written to."""

_version: Callable[[torch.Tensor], int] = attrgetter("_version")

storage_number: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The number of a memory: that of no other as long as it is there."""

OF_PARAMETERS = "_is_param"
"""The attribute that torch sets on a tensor of another kind to make it a parameter."""

ConvNd = _ConvNd
"""The base of all convolutions."""

ConvTransposeNd = _ConvTransposeNd
"""The base of all transposed convolutions."""

RESETS = ("reset_parameters", "_reset_parameters")
"""The methods by which modules draw their parameters; `MultiheadAttention` has the second."""


_MODULE: Any = torch.nn.Module

call_of_modules: Any = _MODULE._call_impl
"""What runs where a module is called."""


def only_one_holds(tensor: Any) -> bool:
    """Whether nothing of torch beside one object of Python holds the memory of a tensor.

    No other tensor is in it, and no saved tensor, hook or collective of C++ holds this one.
    """
    memory = tensor.untyped_storage()  # which is a second holder itself
    return tensor._use_count() == 1 and _torch._C._storage_Use_Count(memory._cdata) == 2


def module_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and the buffers that a module itself has, None for those left out."""
    return module._parameters, module._buffers


def module_values(module: torch.nn.Module) -> list[Any]:
    """The values of a module and of those in it: attributes, parameters, buffers, names of parts.

    Their classes, forwards and hooks are among them. Two lists are of one state of the module if
    their values are the same objects.
    """
    values: list[Any] = module_hooks(None)
    for part in module.modules():
        own, kind = part.__dict__, part.__class__
        values += kind, kind.forward
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            values += module_hooks(part)
        values += own.values()
        values += own["_parameters"].values()
        values += own["_buffers"].values()
        values += own["_modules"]
    return values


def module_hooks(module: torch.nn.Module | None) -> list[Any]:
    """The hooks before and after the forward of a module; without one, of all modules there are."""
    if module is not None:
        before, after = forward_hooks(module)[0]
    else:
        whole: Any = _modules
        before, after = whole._global_forward_pre_hooks, whole._global_forward_hooks
    return [*before.values(), *after.values()]


def forward_hooks(module: torch.nn.Module) -> tuple[list[MutableMapping[int, Any]], ...]:
    """The hooks before and after a forward by number, and what is known of them by number."""
    return (
        [module._forward_pre_hooks, module._forward_hooks],
        [module._forward_pre_hooks_with_kwargs, module._forward_hooks_always_called],
    )


@contextlib.contextmanager
def truncated_normal_by(f: Callable[..., torch.Tensor]) -> Generator[None]:
    """Lets `torch.nn.init.trunc_normal_` draw by this function."""
    module: Any = init
    before = module._no_grad_trunc_normal_
    module._no_grad_trunc_normal_ = f
    try:
        yield
    finally:
        module._no_grad_trunc_normal_ = before


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor, or another view of its memory, was written to; 0 in inference mode."""
    return 0 if tensor.is_inference() else _version(tensor)
