"""Products at indices, whose derivatives read no values: torch asks whether zeros meet in a place.

A factor of 0 has the product of the others for its derivative, so zeros are counted by place. Where
two of `src` meet, the derivative of each is 0, and has a derivative that torch refuses: so it is
here, by a check at the end of the program.
"""

# the static methods of an autograd.Function have the parameters that torch names
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from typing import Any

import torch

from fdtensor.ops.transparent import recorded_as
from fdtensor.ops.value_checks import require
from fdtensor.ops.writes import checked_write

aten = torch.ops.aten

Tensor = torch.Tensor


_SCATTER = aten.scatter_reduce.two
_INDEX = aten.index_reduce.default


class _Product(torch.autograd.Function):
    """One of the two ops, as a product: its derivatives are made of the first."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        op: Any, x: Tensor, dim: int, index: Tensor, src: Tensor, include_self: bool
    ) -> Tensor:
        return op(x, dim, index, src, "prod", include_self=include_self)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op, x, ctx.dim, index, src, ctx.include_self = inputs
        ctx.save_for_backward(x, index, src, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, index, src, out = ctx.saved_tensors
        if ctx.op is _INDEX:
            dims = [-1 if d == ctx.dim % x.ndim else 1 for d in range(x.ndim)]
            index = index.reshape(dims).expand(src.shape)
        how = x, ctx.dim, index, src, ctx.include_self
        of_x = _of_self(grad, *how) if ctx.needs_input_grad[1] else None
        of_src = _of_factors(grad, out, *how) if ctx.needs_input_grad[4] else None
        return None, of_x, None, None, of_src, None


def _scattered(x: Tensor, dim: int, index: Tensor, src: Tensor, include_self: bool) -> Tensor:
    out: Any = _Product.apply(_SCATTER, x, dim, index, src, include_self)
    return out


def _of_self(
    grad: Tensor, x: Tensor, dim: int, index: Tensor, src: Tensor, include_self: bool
) -> Tensor:
    """`grad * (the product of the factors)`; 0 where they are written over `x`"""
    if not include_self:
        return grad.scatter(dim, index, 0)
    known = x.masked_fill(x == 0, 1)
    return grad * _scattered(known, dim, index, src, True) / known


def _of_factors(
    grad: Tensor, out: Tensor, x: Tensor, dim: int, index: Tensor, src: Tensor, include_self: bool
) -> Tensor:
    """`grad * (the product of the others)`: the result by the factor, unless the factor is 0"""
    zero = src == 0
    zeros = torch.zeros_like(x).scatter_add(dim, index, zero.to(x.dtype)).gather(dim, index)
    alone = zero & (zeros == 1)
    others = _scattered(x, dim, index, src.masked_fill(alone, 1), include_self)
    of_zero = (grad * others).gather(dim, index)
    of_any = (grad * out).gather(dim, index) / src.masked_fill(zero, 1)
    once: Any = _Once.apply(torch.where(alone, of_zero, of_any), zeros)
    return once


class _Once(torch.autograd.Function):
    """A derivative, whose own derivative is right where no two factors of 0 meet."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, zeros: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (zeros,) = ctx.saved_tensors
        require(zeros <= 1, "zeros of scatter_reduce in one place, 0 or 1 for a second derivative")
        return grad, None


def _product(
    op: Any, x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, own: bool
) -> Any:
    """The result of one of the ops, where it is a product that has a derivative; else None."""
    fits = index.shape == src.shape if op is _SCATTER else x.ndim == src.ndim > 0
    floats = x.is_floating_point() and x.dtype == src.dtype
    if reduce != "prod" or not fits or not floats or not index.numel():
        return None
    return _Product.apply(op, x, dim, index, src, own)


def _written(op: Any, in_place: Any, args: Any, own: bool) -> Any:
    """The result of one of the ops in place; a product is of a copy, which its derivative reads."""
    x, dim, index, src, reduce = args
    out = _product(op, x.clone(), dim, index, src, reduce, own)
    if out is not None:
        return checked_write(Tensor.copy_, (x, out), {})
    return checked_write(in_place, args, {"include_self": own})


@recorded_as(torch.scatter_reduce, Tensor.scatter_reduce)
def scatter_reduce(input, dim, index, src, reduce, *, include_self=True):
    """`out[k, j] = reduce(x[k, j], src[i, j] for i with index[i, j] == k)` along dim 0"""
    out = _product(_SCATTER, input, dim, index, src, reduce, include_self)
    if out is not None:
        return out
    return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self)


@recorded_as(Tensor.scatter_reduce_)
def scatter_reduce_(input, dim, index, src, reduce, *, include_self=True):
    """The same in place."""
    args = input, dim, index, src, reduce
    return _written(_SCATTER, Tensor.scatter_reduce_, args, include_self)


@recorded_as(torch.index_reduce, Tensor.index_reduce)
def index_reduce(input, dim, index, source, reduce, *, include_self=True):
    """The same with an index for each slice."""
    out = _product(_INDEX, input, dim, index, source, reduce, include_self)
    if out is not None:
        return out
    return torch.index_reduce(input, dim, index, source, reduce, include_self=include_self)


@recorded_as(Tensor.index_reduce_)
def index_reduce_(input, dim, index, source, reduce, *, include_self=True):
    """The same in place."""
    args = input, dim, index, source, reduce
    return _written(_INDEX, Tensor.index_reduce_, args, include_self)
