"""Ops that only say where the same elements are: permutations, expansions, other dims."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch

from fdtensor.notation.core import P, R, S, U, rule
from fdtensor.notation.reshape import reshaped

__all__ = ["placed"]

aten = torch.ops.aten


def placed(order: Iterable[int | None]):
    """The rows of an op whose output dims are dims `order` of its operand, None a new one."""
    yield (P,), P
    for d, source in enumerate(order):
        if source is not None:
            yield (S(source),), S(d)


def _to_shape(at, x, *_):
    return x.reshape(at.outs[0].shape)


@rule(
    aten.view.default,
    aten.view_copy.default,
    aten._unsafe_view.default,
    aten._reshape_copy.default,
    sizes={"size": 0},
)
@rule(
    aten.reshape.default,
    aten._reshape_alias.default,
    aten._reshape_alias_copy.default,
    local=_to_shape,
)
def view(x, size, stride=None):
    """`out[flat] = x[flat]`"""
    yield (P,), P
    known = prod(n for n in size if n >= 0)
    yield from reshaped(x.shape, [x.numel // max(1, known) if n < 0 else n for n in size])


@rule(aten.t, aten.t_copy)
def t(x):
    """`out[j, i] = x[i, j]`"""
    yield from placed(reversed(range(x.ndim)))


@rule(aten.transpose.int, aten.transpose_copy.int)
def transpose(x, a, b):
    """`out[..., j, ..., i, ...] = x[..., i, ..., j, ...]`"""
    order = list(range(x.ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    yield from placed(order)


@rule(aten.permute, aten.permute_copy)
def permute(x, dims):
    """`out[i_0, i_1, ...] = x[...]` with `out.shape[d] = x.shape[dims[d]]`"""
    yield from placed(d % x.ndim for d in dims)


@rule(aten.unsqueeze, aten.unsqueeze_copy)
def unsqueeze(x, dim):
    """`out[i, 0, j] = x[i, j]`"""
    order: list[int | None] = list(range(x.ndim))
    order.insert(dim % (x.ndim + 1), None)
    yield from placed(order)


@rule(aten.squeeze, aten.squeeze_copy, local=_to_shape)
def squeeze(x, dims=None):
    """`out[i, j] = x[i, 0, j]`"""
    named = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % max(1, x.ndim) for d in named}
    yield from placed(d for d, n in enumerate(x.shape) if n != 1 or d not in gone)


@rule(aten.expand, aten.expand_copy, aten.broadcast_to, sizes={"size": 0})
def expand(x, size, *, implicit=False):
    """`out[i, j] = x[0, j]`"""
    new = len(size) - x.ndim
    same = [d >= new and n in (-1, x.shape[d - new]) for d, n in enumerate(size)]
    yield from placed(d - new if kept else None for d, kept in enumerate(same))
    for d, kept in enumerate(same):
        if not kept:
            yield (R,), S(d)


@rule(aten.view_as_real, aten.view_as_real_copy)
def view_as_real(x):
    """`out[i, 0] = real(x[i])`, `out[i, 1] = imag(x[i])`"""
    yield from placed(range(x.ndim))


@rule(aten.view_as_complex, aten.view_as_complex_copy)
def view_as_complex(x):
    """`out[i] = x[i, 0] + 1j * x[i, 1]`"""
    yield from placed(range(x.ndim - 1))


def _bits(at, x, dtype):
    if 0 in at.outs[0].shape:
        return x.new_zeros(at.outs[0].shape, dtype=dtype)
    return x.clone(memory_format=torch.contiguous_format).view(dtype)


@rule(aten.view.dtype, aten.view_copy.dtype, local=_bits)
def view_dtype(x, dtype):
    """`out[i, j, ...] = bits of x[i, j, ...]`: bits of a term say nothing of the sum"""
    last, before, after = x.ndim - 1, x.dtype.itemsize, dtype.itemsize
    for d in range(x.ndim):
        if d < last or before == after:
            yield (S(d),), S(d)
        else:
            yield (U(d, max(1, after // before)),), U(d, max(1, before // after))
