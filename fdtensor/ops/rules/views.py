"""Views: permutations, expansions and other dims of the same elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch

from fdtensor.ops.notation.core import P, R, S, Units
from fdtensor.ops.notation.ops import on
from fdtensor.ops.notation.reshape import reshaped

__all__ = ["placed"]


def placed(order: Iterable[int | None], own: Mapping[int, Any] | None = None):
    """The rows of an op whose output dims are dims `order` of its operand, None a new one.

    A cut of an output dim in `own` needs the placement of the operand in it.
    """
    yield (P,), P
    special = own or {}
    for d, source in enumerate(order):
        if d in special:
            yield (special[d],), S(d)
        elif source is not None:
            yield (S(source),), S(d)


def _to_shape(at, x, *_):
    return x.reshape(at.outs[0].shape)


@on("view view_copy _unsafe_view _reshape_copy", sizes={"size": 0})
@on("reshape _reshape_alias _reshape_alias_copy", local=_to_shape)
def view(x, size, stride=None):
    """`out[flat] = x[flat]`"""
    yield (P,), P
    known = prod(n for n in size if n >= 0)
    yield from reshaped(x.shape, [x.numel // max(1, known) if n < 0 else n for n in size])


@on("t t_copy")
def t(x):
    """`out[j, i] = x[i, j]`"""
    yield from placed(reversed(range(x.ndim)))


@on("transpose.int transpose_copy.int")
def transpose(x, a, b):
    """`out[..., j, ..., i, ...] = x[..., i, ..., j, ...]`"""
    order = list(range(x.ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    yield from placed(order)


@on("permute permute_copy")
def permute(x, dims):
    """`out[i_0, i_1, ...] = x[...]` with `out.shape[d] = x.shape[dims[d]]`"""
    yield from placed(d % x.ndim for d in dims)


@on("unsqueeze unsqueeze_copy")
def unsqueeze(x, dim):
    """`out[i, 0, j] = x[i, j]`"""
    order: list[int | None] = list(range(x.ndim))
    order.insert(dim % (x.ndim + 1), None)
    yield from placed(order)


@on("squeeze squeeze.dim squeeze.dims", local=_to_shape)
@on("squeeze_copy squeeze_copy.dim squeeze_copy.dims", local=_to_shape)
def squeeze(x, dims=None):
    """`out[i, j] = x[i, 0, j]`"""
    named = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % max(1, x.ndim) for d in named}
    yield from placed(d for d, n in enumerate(x.shape) if n != 1 or d not in gone)


@on("expand expand_copy broadcast_to", sizes={"size": 0})
def expand(x, size, *, implicit=False):
    """`out[i, j] = x[0, j]`"""
    new = len(size) - x.ndim
    same = [d >= new and n in (-1, x.shape[d - new]) for d, n in enumerate(size)]
    expanded = {d: R for d, kept in enumerate(same) if not kept}
    yield from placed(range(-new, x.ndim), expanded)


@on("view_as_real view_as_real_copy")
def view_as_real(x):
    """`out[i, 0] = real(x[i])`, `out[i, 1] = imag(x[i])`"""
    yield from placed(range(x.ndim))


@on("view_as_complex view_as_complex_copy")
def view_as_complex(x):
    """`out[i] = x[i, 0] + 1j * x[i, 1]`"""
    yield from placed(range(x.ndim - 1))


def _bits(at, x, dtype):
    if 0 in at.outs[0].shape:
        return x.new_zeros(at.outs[0].shape, dtype=dtype)
    return x.clone(memory_format=torch.contiguous_format).view(dtype)


@on("view.dtype view_copy.dtype", local=_bits)
def view_dtype(x, dtype):
    """`out[i, j, ...] = bits of x[i, j, ...]`: bits of a term say nothing of the sum"""
    last, before, after = x.ndim - 1, x.dtype.itemsize, dtype.itemsize
    for d in range(x.ndim):
        if d < last or before == after:
            yield (S(d),), S(d)
        else:
            yield (Units(d, max(1, after // before)),), Units(d, max(1, before // after))
