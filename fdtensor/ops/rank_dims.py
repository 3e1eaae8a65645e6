"""Ops on a dim that has an entry for each rank along an axis: `same`, `first` and `exchanged`.

In them the entries are the tensors of the ranks. `same` and `first` are each other's transpose.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.ops.own_ops import own_op

__all__ = ["FIRST", "PERMUTED", "SAME", "exchanged", "first", "same"]


def _same(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.select(dim, 0).clone()


def _first(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    zeros = x.new_zeros((*x.shape[:dim], count - 1, *x.shape[dim:]))
    return torch.cat([x.unsqueeze(dim), zeros], dim)


def _permuted(x: torch.Tensor, dim: int, sources: Sequence[int]) -> torch.Tensor:
    return x.index_select(dim, torch.tensor(sources, device=x.device))


def _permuted_like(x: torch.Tensor, dim: int, sources: Sequence[int]) -> torch.Tensor:
    return x.new_empty((*x.shape[:dim], len(sources), *x.shape[dim + 1 :]))


SAME = own_op("same(Tensor x, int dim) -> Tensor", _same)
"""The entry that all entries along a dim are equal to."""

FIRST = own_op("first(Tensor x, int dim, int count) -> Tensor", _first)
"""A new dim with the tensor as its first entry, or its terms as the entries; else zeros."""

PERMUTED = own_op("permuted(Tensor x, int dim, int[] sources) -> Tensor", _permuted, _permuted_like)
"""The entries `sources` of a dim."""


def same(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor that each entry along a dim is equal to."""
    return _Applied.apply(SAME, x, dim, x.shape[dim])  # type: ignore[return-value]


def first(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """A tensor with a further dim, whose entries add up to `x`: zeros but for one, or terms."""
    return _Applied.apply(FIRST, x, dim, count)  # type: ignore[return-value]


class _Applied(torch.autograd.Function):
    """`same` or `first`."""

    @staticmethod
    def forward(op: Any, x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
        return op(x, dim) if op is SAME else op(x, dim, count)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op, _, ctx.dim, ctx.count = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        transpose = FIRST if ctx.op is SAME else SAME
        return None, _Applied.apply(transpose, grad, ctx.dim, ctx.count), None, None

    @staticmethod
    def jvp(ctx: Any, _op: None, tangent: torch.Tensor, *_: None) -> Any:  # type: ignore[override]
        return _Applied.apply(ctx.op, tangent, ctx.dim, ctx.count)

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: Any, x: torch.Tensor, dim: int, count: int) -> Any:  # type: ignore[override]
        return _Applied.apply(op, x.movedim(in_dims[1], 0), dim + 1, count), 0


def exchanged(x: torch.Tensor, dim: int, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Entry `src` of a dim at `dst`, for each pair; zeros where none comes."""
    return _Exchanged.apply(x, dim, tuple(pairs))  # type: ignore[return-value]


class _Exchanged(torch.autograd.Function):
    """Entries of a dim that change places."""

    @staticmethod
    def forward(x: torch.Tensor, dim: int, pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
        count = x.shape[dim]
        sources, arrives = list(range(count)), [False] * count
        for src, dst in pairs:
            sources[dst], arrives[dst] = src, True
        y = PERMUTED(x, dim, sources)
        if all(arrives):
            return y
        shape = [count if d == dim else 1 for d in range(x.dim())]
        places = torch.arange(count, device=x.device)
        is_few = 2 * sum(arrives) < count
        named = [places == d for d, arrived in enumerate(arrives) if arrived == is_few]
        named = functools.reduce(torch.Tensor.logical_or, named, torch.zeros_like(places) != 0)
        kept = named if is_few else ~named
        return torch.where(kept.view(shape), y, torch.zeros((), dtype=x.dtype, device=x.device))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.dim, ctx.pairs = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        back = tuple(sorted((dst, src) for src, dst in ctx.pairs))
        return _Exchanged.apply(grad, ctx.dim, back), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> Any:  # type: ignore[override]
        return _Exchanged.apply(tangent, ctx.dim, ctx.pairs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, dim: int, pairs: Any) -> Any:  # type: ignore[override]
        return _Exchanged.apply(x.movedim(in_dims[0], 0), dim + 1, pairs), 0
