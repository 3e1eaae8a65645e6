"""Private names of torch for ops, their schemas and what defines them: 2.11 to 2.13."""

# pyright: reportPrivateUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _OpNamespace

__all__ = [
    "FOREACH",
    "TENSOR_TYPE",
    "CustomOpDef",
    "HigherOrderOperator",
    "OpNamespace",
    "OpOverload",
    "OpOverloadPacket",
    "abstract_function",
    "associative_rounds",
    "backward_function",
    "check_schema",
    "decomposition_table",
    "foreach_mul_",
    "foreach_norm",
    "functional_collectives",
    "grouped_mm",
    "has_kernel",
    "has_schema",
    "jit_overload",
    "op_function",
    "overload_in",
    "overload_name",
    "packet_name",
    "packet_of",
    "qualified_name",
    "qualified_name_or",
    "schema_of",
    "setup_context_function",
]

_torch: Any = torch

OpNamespace = _OpNamespace
"""The class of `torch.ops.aten` and other namespaces of ops."""

FOREACH = "_foreach_"
"""The prefix of functions that do the same to each tensor of a list."""

foreach_norm: Any = _torch._foreach_norm
"""The norm of each tensor of a list, in few kernels."""

foreach_mul_: Any = _torch._foreach_mul_
"""Multiplies each tensor of a list in place, in few kernels."""

grouped_mm: Any = _torch._grouped_mm
"""The product of each group of rows with a matrix of its own."""

functional_collectives: Any = _torch.ops._c10d_functional
"""The namespace of the collectives that return new tensors, and of the wait for them."""

TENSOR_TYPE: Any = _torch._C.TensorType.get()
"""The type of a tensor in a schema."""

# --- ops and their names ---------------------------------------------------------------------

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""The schema of an op: its arguments and what it returns."""

packet_name: Callable[[Any], str] = attrgetter("_opname")
"""The name of an op without its namespace and overload: `add`."""

overload_name: Callable[[Any], str] = attrgetter("_overloadname")
"""The name of an overload, `default` where it has none: `Tensor`."""

packet_of: Callable[[Any], OpOverloadPacket] = attrgetter("_overloadpacket")
"""All overloads of an op."""

qualified_name: Callable[[OpOverloadPacket], str] = attrgetter("_qualified_op_name")
"""The name of all overloads of an op with their namespace: `aten::add`."""

has_kernel: Any = _torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether an op, by its name, has a kernel of its own for a dispatch key, by its name."""

check_schema: Any = _torch._C._get_schema
"""Raises RuntimeError where there is no op of this qualified name and overload."""


def has_schema(op: object) -> bool:
    """Whether something is an overload of an op, and no other function."""
    return hasattr(op, "_schema")


def qualified_name_or(function: Any) -> Any:
    """The qualified name of all overloads of an op; any other function as it is."""
    return getattr(function, "_qualified_op_name", function)


def jit_overload(packet: OpOverloadPacket, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The name of the overload that a call with these arguments means; empty for the default."""
    return _torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)


def overload_in(op: Any) -> Any:
    """The overload of a `CustomOpDef`; anything else as it is."""
    return getattr(op, "_opoverload", op)


# --- what ops are defined by -----------------------------------------------------------------


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


@functools.cache
def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """The decompositions of torch, by op; the import takes a while."""
    return import_module("torch._decomp").decomposition_table


def associative_rounds(
    combine: Callable[..., Any], xs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """The scan of tensors along dim 0 by an associative function, in logarithmically many rounds.

    Versions 2.11 to 2.13: `generic_associative_scan`, which `torch.associative_scan` is made of.
    """
    from torch._higher_order_ops.associative_scan import generic_associative_scan

    scan: Any = generic_associative_scan
    return scan(combine, list(xs), additional_inputs=())
