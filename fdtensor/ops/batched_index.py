"""`taken`, `added` and `copied`: entries at indices, where `vmap` gives each tensor its own.

Torch's batching rules number the entries of all tensors, or take one tensor after the other; as ops
of a batch these keep a cut of it. The first two are each other's transpose.
"""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.ops.own_ops import own_op

__all__ = ["ADDED", "COPIED", "TAKEN", "added", "copied", "taken"]

Tensor = torch.Tensor


def _flat(x: Tensor, index: Tensor) -> Tensor:
    """The indices, as those of all entries of the batch in one dim."""
    size = x.shape[1]
    own = torch.where(index < 0, index + size, index)
    if len(own) > 1:
        own = own + size * torch.arange(len(own), device=own.device).unsqueeze(1)
    return own.flatten()


def _taken(x: Tensor, index: Tensor, _wraps: bool) -> Tensor:
    return x.flatten(0, 1).index_select(0, _flat(x, index)).unflatten(0, index.shape)


def _added(x: Tensor, index: Tensor, source: Tensor, _wraps: bool) -> Tensor:
    sums = x.flatten(0, 1).index_add(0, _flat(x, index), source.flatten(0, 1))
    return sums.unflatten(0, x.shape[:2])


def _copied(x: Tensor, index: Tensor, source: Tensor, _wraps: bool) -> Tensor:
    new = x.flatten(0, 1).index_copy(0, _flat(x, index), source.flatten(0, 1))
    return new.unflatten(0, x.shape[:2])


TAKEN = own_op("index_select(Tensor self, Tensor index, bool wraps) -> Tensor", _taken)
"""`out[b, i] = x[b, index[b, i]]`; where it `wraps`, indices below 0 count from the end."""

ADDED = own_op("index_add(Tensor self, Tensor index, Tensor source, bool wraps) -> Tensor", _added)
"""`out[b, j] = x[b, j] + sum_i source[b, i] * (index[b, i] == j)`"""

COPIED = own_op(
    "index_copy(Tensor self, Tensor index, Tensor source, bool wraps) -> Tensor", _copied
)
"""`out[b, index[b, i]] = source[b, i]`, and `x` elsewhere."""


def taken(x: Tensor, index: Tensor, wraps: bool) -> Tensor:
    """`out[i] = x[index[i]]`, in which a `vmap` may have an index of its own for each entry."""
    return _Taken.apply(x.unsqueeze(0), index.unsqueeze(0), wraps).squeeze(0)  # type: ignore[union-attr]


def added(x: Tensor, index: Tensor, source: Tensor, wraps: bool) -> Tensor:
    """`out[j] = x[j] + sum_i source[i] * (index[i] == j)`, likewise."""
    operands = (x.unsqueeze(0), index.unsqueeze(0), source.unsqueeze(0))
    return _Written.apply(ADDED, *operands, wraps).squeeze(0)  # type: ignore[union-attr]


def copied(x: Tensor, index: Tensor, source: Tensor, wraps: bool) -> Tensor:
    """`out[index[i]] = source[i]`, and `x` elsewhere, likewise."""
    operands = (x.unsqueeze(0), index.unsqueeze(0), source.unsqueeze(0))
    return _Written.apply(COPIED, *operands, wraps).squeeze(0)  # type: ignore[union-attr]


def _merged(count: int, dims: tuple[int | None, ...], *tensors: Tensor) -> list[Tensor]:
    """The tensors with the entries of a `vmap` in their batch."""
    return [
        (t.expand(count, *t.shape) if d is None else t.movedim(d, 0) if d else t).flatten(0, 1)
        for d, t in zip(dims, tensors, strict=True)
    ]


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, index: Tensor, wraps: bool) -> Tensor:
        return TAKEN(x, index, wraps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, index, ctx.wraps = inputs
        ctx.size = x.shape[1]
        ctx.save_for_backward(index)
        ctx.save_for_forward(index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        zeros = grad.new_zeros((len(grad), ctx.size, *grad.shape[2:]))
        return _Written.apply(ADDED, zeros, index, grad, ctx.wraps), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:  # type: ignore[override]
        return _Taken.apply(tangent, ctx.saved_tensors[0], ctx.wraps)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor, wraps: bool) -> Any:  # type: ignore[override]
        out: Any = _Taken.apply(*_merged(info.batch_size, in_dims[:2], x, index), wraps)
        return out.unflatten(0, (info.batch_size, -1)), 0


class _Written(torch.autograd.Function):
    @staticmethod
    def forward(op: Any, x: Tensor, index: Tensor, source: Tensor, wraps: bool) -> Tensor:
        return op(x, index, source, wraps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op, _, index, _, ctx.wraps = inputs
        ctx.save_for_backward(index)
        ctx.save_for_forward(index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        of_source: Any = _Taken.apply(grad, index, ctx.wraps)
        kept = grad
        if ctx.op is COPIED:  # what was written over does not count
            kept = _Written.apply(COPIED, grad, index, torch.zeros_like(of_source), ctx.wraps)
        return None, kept, None, of_source, None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, __: None, of_source: Tensor, *___: None) -> Any:  # type: ignore[override]
        return _Written.apply(ctx.op, tangent, ctx.saved_tensors[0], of_source, ctx.wraps)

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any, in_dims: Any, op: Any, x: Tensor, index: Tensor, source: Tensor, wraps: bool
    ) -> Any:
        operands = _merged(info.batch_size, in_dims[1:4], x, index, source)
        out: Any = _Written.apply(op, *operands, wraps)
        return out.unflatten(0, (info.batch_size, -1)), 0
