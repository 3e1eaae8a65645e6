"""`refuse_mixed`: operands of several dtypes where torch refuses them, but not on fake tensors.

A program of such a call would be chosen and priced, and fail on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.layouts.dtypes import dtype_name
from fdtensor.ops.precision import HALVES

__all__ = ["refuse_mixed"]

aten: Any = torch.ops.aten

_ALIKE: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.mv.default: (0, 1),
    aten.addmv.default: (0, 1, 2),
    aten.addbmm.default: (0, 1, 2),
    aten._cdist_forward.default: (0, 1),
    aten.binary_cross_entropy.default: (0, 1, 2),
    aten.nll_loss_forward.default: (0, 2),
    aten.nll_loss2d_forward.default: (0, 2),
    aten.index_add.default: (0, 3),
    aten.index_copy.default: (0, 3),
    aten.index_put.default: (0, 2),
    aten.heaviside.default: (0, 1),
    aten.linalg_cross.default: (0, 1),
    aten.linalg_lstsq.default: (0, 1),
}
"""The operands that have one dtype, by their numbers."""

_NORMS: dict[Any, tuple[int, ...]] = {
    aten.native_layer_norm.default: (0, 2, 3),
    aten.native_group_norm.default: (0, 1, 2),
    aten._native_batch_norm_legit_functional.default: (0, 1, 2),
    aten.native_batch_norm.default: (0, 1, 2),
}
"""The input of a norm and its parameters, which may be float32 beside halves."""

_OPERANDS = {**_ALIKE, **_NORMS}


def refuse_mixed(op: Any, args: Sequence[Any]) -> None:
    """Raises `RuntimeError`, as the op itself would, where it does not take these dtypes."""
    places = _OPERANDS.get(op)
    if places is None:
        return
    operands = [args[i] for i in places if i < len(args) and isinstance(args[i], torch.Tensor)]
    dtypes = [t.dtype for t in operands]
    first, others = dtypes[0], set(dtypes[1:])
    if op in _NORMS and first in HALVES and others == {torch.float32}:
        return
    if others - {first}:
        names = ", ".join(map(dtype_name, dtypes))
        raise RuntimeError(f"{op} takes operands of one dtype, not of {names}")
