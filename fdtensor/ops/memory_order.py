"""`in_order_of_kernel`: fakes that lie in memory as the kernels of some ops lay what they give.

Whether `contiguous()` and `reshape()` copy, and so what a later write changes, depends on strides.
A few fakes have other strides than what kernels give for operands that are not contiguous:
`tests/ops/test_memory_order.py` looks for them in torch's database of ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch.utils._python_dispatch import _disable_current_modes

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
        aten.log_sigmoid_forward.default,
        aten.logaddexp.default,
        aten.logical_and.default,
        aten.logical_or.default,
        aten.logical_xor.default,
        aten.native_dropout_backward.default,
    )
)
"""The ops whose fakes may have other strides than what their kernels give.

Batch norms are others. They keep what the fake says: products of what is not row-major are not
folded into one, and every layer after a batch norm of a transposed tensor would be a batched one.
"""


WHOLE = 64
"""The largest sizes with which a kernel is asked that does not take sizes of 2."""


def in_order_of_kernel(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """`out`, the fakes that an op of `IN_OTHER_ORDER` gave, laid out as the kernel lays it.

    The kernel is asked with the same operands, but with sizes of at most 2 where it takes them.
    """
    given: Any = (args, kwargs)
    leaves, spec = optree.tree_flatten(given, none_is_leaf=True)
    if all(leaf.is_contiguous() for leaf in leaves if isinstance(leaf, torch.Tensor)):
        return out
    answer = _answer(func, leaves, spec, 2)
    if answer is None:  # other arguments go with the whole sizes
        answer = _answer(func, leaves, spec, WHOLE)
    if answer is None:
        return out
    outs, tree = optree.tree_flatten(out, none_is_leaf=True)
    answers = optree.tree_leaves(answer, none_is_leaf=True)
    return optree.tree_unflatten(
        tree, [_laid(fake, order) for fake, order in zip(outs, answers, strict=True)]
    )


def _answer(func: Any, leaves: Sequence[Any], spec: Any, most: int) -> Any:
    """What the op gives for real operands of sizes up to `most`; None where it takes none such."""
    real = [_real(leaf, most) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    given: Any = optree.tree_unflatten(spec, real)
    args, kwargs = given
    try:
        with _disable_current_modes(), torch._C._DisableFuncTorch():
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
    with _disable_current_modes(), torch._C._DisableFuncTorch():
        return torch.empty_strided(shape, strides, dtype=t.dtype, device="cpu").zero_()


def _laid(fake: Any, like: Any) -> Any:
    if not isinstance(fake, torch.Tensor):
        return fake
    strides = _strided(fake.shape, _order(like))
    if list(fake.stride()) == strides:
        return fake
    return torch.empty_strided(fake.shape, strides, dtype=fake.dtype, device=fake.device)
