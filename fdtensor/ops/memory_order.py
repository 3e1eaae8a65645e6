"""`in_order_of_kernel`: fake results with the strides that the kernels of some ops give.

Whether `contiguous()` and `reshape()` copy, and so which tensors a later write changes, depends on
strides. For operands that are not contiguous a few fakes have other strides than the results of
kernels: `tests/ops/test_memory_order.py` searches torch's database of ops for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch

from fdtensor.layouts.torch_private import without_modes, without_transforms
from fdtensor.ops.counted_index import LOOKED_UP

__all__ = ["IN_OTHER_ORDER", "in_order_of_kernel"]

aten = torch.ops.aten

IN_OTHER_ORDER = frozenset(
    (
        aten.all.dims,
        aten.angle.default,
        aten.channel_shuffle.default,
        aten.native_channel_shuffle.default,
        aten.max_unpool2d.default,
        aten.roll.default,
        aten.any.dims,
        aten.copysign.Tensor,
        aten.div.Tensor_mode,
        aten.floor_divide.default,
        aten.heaviside.default,
        aten.index.Tensor,
        LOOKED_UP,
        aten.log_sigmoid_forward.default,
        aten.logaddexp.default,
        aten.logical_and.default,
        aten.logical_or.default,
        aten.logical_xor.default,
        aten.native_dropout_backward.default,
    )
)
"""The ops whose fakes may have other strides than the results of their kernels.

Batch norms are such ops too, but keep the strides of the fake: products of tensors that are not
row-major are not folded into one, and every layer after a batch norm of a transposed tensor would
be a batched product.
"""

WHOLE = 64
"""The largest sizes of the operands of a kernel that does not take sizes of 2."""


def in_order_of_kernel(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """`out`, the fake result of an op of `IN_OTHER_ORDER`, with the strides that the kernel gives.

    The kernel is run on the same operands, but with sizes of at most 2 where it takes them.
    """
    operands: Any = (args, kwargs)
    leaves, spec = optree.tree_flatten(operands, none_is_leaf=True)
    if all(leaf.is_contiguous() for leaf in leaves if isinstance(leaf, torch.Tensor)):
        return out
    answer = _of_kernel(func, leaves, spec, 2)
    if answer is None:  # other arguments fit the whole sizes alone
        answer = _of_kernel(func, leaves, spec, WHOLE)
    if answer is None:
        return out
    outs, tree = optree.tree_flatten(out, none_is_leaf=True)
    answers = optree.tree_leaves(answer, none_is_leaf=True)
    return optree.tree_unflatten(
        tree, [_restrided(fake, real) for fake, real in zip(outs, answers, strict=True)]
    )


def _of_kernel(func: Any, leaves: Sequence[Any], spec: Any, most: int) -> Any:
    """The result of the op for real operands of sizes up to `most`; None where it refuses them."""
    real = [_real(leaf, most) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    operands: Any = optree.tree_unflatten(spec, real)
    args, kwargs = operands
    try:
        with without_modes(), without_transforms():
            return func(*args, **kwargs)
    except RuntimeError:
        return None


def _order(t: torch.Tensor) -> list[int]:
    """The dims from the outermost in memory to the innermost."""
    return sorted(range(t.ndim), key=lambda d: -t.stride(d))


def _strided(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """The strides of a dense tensor whose dims lie in this order."""
    strides, step = [1] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return strides


def _real(t: torch.Tensor, most: int) -> torch.Tensor:
    """A real tensor of zeros like `t`, with sizes of at most `most`."""
    shape = [min(n, most) for n in t.shape]
    strides = _strided(shape, _order(t))
    with without_modes(), without_transforms():
        return torch.empty_strided(shape, strides, dtype=t.dtype, device="cpu").zero_()


def _restrided(fake: Any, like: Any) -> Any:
    if not isinstance(fake, torch.Tensor):
        return fake
    strides = _strided(fake.shape, _order(like))
    if list(fake.stride()) == strides:
        return fake
    return torch.empty_strided(fake.shape, strides, dtype=fake.dtype, device=fake.device)
