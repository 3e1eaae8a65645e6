"""Private names of torch for the batching rules of its ops: 2.11 to 2.13."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch._functorch import vmap

from fdtensor.layouts.torch_private.ops import OpOverload

__all__ = ["only_batched_ops", "unbatched"]

_C: Any = torch._C
_maps: Any = _C._functorch
_vmap: Any = vmap
_has_kernel: Any = _C._dispatch_has_kernel_for_dispatch_key

_BATCHED, _IN_SIMPLER = "FuncTorchBatched", "FuncTorchBatchedDecomposition"

_OTHERS = ("_add_batch_dim", "_remove_batch_dim", "_unpack_dual", "requires_grad_", "set_", "data")
"""Ops of transforms, and those of the attributes of a tensor."""


@functools.cache
def unbatched() -> Mapping[OpOverload, bool]:
    """The ops of aten, from tensors to tensors, that `vmap` has no rule for.

    With whether torch itself runs them as other ops where no `vmap` is around.
    """
    _vmap.lazy_load_decompositions()  # which are rules, once a first vmap has run
    known: dict[OpOverload, bool] = {}
    for full in sorted(_C._dispatch_get_all_op_names()):
        kind, _, name = full.partition("::")
        packet, _, overload = name.partition(".")
        if kind != "aten" or packet in _OTHERS or re.match(r"_test_\w+", packet):
            continue
        if _has_kernel(full, _BATCHED) or _has_kernel(full, _IN_SIMPLER):
            continue
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is not None and _of_tensors(op):
            known[op] = _has_kernel(full, "CompositeImplicitAutograd")
    return known


def _of_tensors(op: OpOverload) -> bool:
    taken, given = op._schema.arguments, op._schema.returns
    return (
        bool(given)
        and all("Tensor" in str(a.type) for a in given)
        and any("Tensor" in str(a.type) for a in taken)
        and not any(a.is_out for a in taken)
    )


_GIVEN: list[Mapping[OpOverload, Callable[..., Any]]] = []
"""The rules of the contexts around, of which the outermost counts: a rule is given once."""


@contextlib.contextmanager
def only_batched_ops(rules: Mapping[OpOverload, Callable[..., Any]]) -> Generator[None]:
    """A context in which `vmap` refuses ops without a batching rule, which it would loop over.

    For those of `rules` it calls these functions instead, of which each takes what the op takes,
    and calls other ops. One that is inside of another changes nothing.
    """
    if _GIVEN:
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    before = _maps._is_vmap_fallback_enabled()
    _maps._set_vmap_fallback_enabled(False)
    _GIVEN.append(rules)
    try:
        for op, f in rules.items():
            library.impl(op.name().removeprefix("aten::"), f, _IN_SIMPLER)
        yield
    finally:
        _GIVEN.clear()
        library._destroy()
        _maps._set_vmap_fallback_enabled(before)
