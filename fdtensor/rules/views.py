"""Ops that only say where the same elements are: permutations, expansions, other dims."""

from __future__ import annotations

from math import prod

import torch

from fdtensor.rules.core import P, R, S, U, rule
from fdtensor.rules.reshape import reshaped

aten = torch.ops.aten


def _to_shape(at, x, *_):
    return x.reshape(at.outs[0].shape)


@rule(
    aten.view.default,
    aten.view_copy.default,
    aten._unsafe_view.default,
    aten._reshape_copy.default,
    sizes={"size": 0},
)
def view(x, size):
    """`out[flat] = x[flat]`"""
    yield (P,), P
    known = prod(n for n in size if n >= 0)
    yield from reshaped(x.shape, [x.numel // max(1, known) if n < 0 else n for n in size])


@rule(
    aten.reshape.default,
    aten._reshape_alias.default,
    aten._reshape_alias_copy.default,
    local=_to_shape,
)
def reshape(x, size, stride=None):
    """`out[flat] = x[flat]`"""
    yield from view(x, size)


@rule(aten.t.default, aten.t_copy.default)
def t(x):
    """`out[j, i] = x[i, j]`"""
    yield (P,), P
    for d in range(x.ndim):
        yield (S(d),), S(x.ndim - 1 - d)


@rule(aten.transpose.int, aten.transpose_copy.int)
def transpose(x, a, b):
    """`out[..., j, ..., i, ...] = x[..., i, ..., j, ...]`"""
    yield (P,), P
    order = list(range(x.ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    for d, source in enumerate(order):
        yield (S(source),), S(d)


@rule(aten.permute.default, aten.permute_copy.default)
def permute(x, dims):
    """`out[i_0, i_1, ...] = x[...]` with `out.shape[d] = x.shape[dims[d]]`"""
    yield (P,), P
    for d, source in enumerate(dims):
        yield (S(source % x.ndim),), S(d)


@rule(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def unsqueeze(x, dim):
    """`out[i, 0, j] = x[i, j]`"""
    yield (P,), P
    dim %= x.ndim + 1
    for d in range(x.ndim):
        yield (S(d),), S(d + (d >= dim))


@rule(
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
    local=_to_shape,
)
def squeeze(x, dims=None):
    """`out[i, j] = x[i, 0, j]`"""
    yield (P,), P
    named = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % max(1, x.ndim) for d in named}
    gone = {d for d in gone if x.ndim and x.shape[d] == 1}
    kept = [d for d in range(x.ndim) if d not in gone]
    for to, d in enumerate(kept):
        yield (S(d),), S(to)


@rule(
    aten.expand.default,
    aten.expand_copy.default,
    aten.broadcast_to.default,
    sizes={"size": 0},
)
def expand(x, size, *, implicit=False):
    """`out[i, j] = x[0, j]`"""
    yield (P,), P
    new = len(size) - x.ndim
    for d, n in enumerate(size):
        if d >= new and n in (-1, x.shape[d - new]):
            yield (S(d - new),), S(d)
        else:
            yield (R,), S(d)


@rule(aten.view_as_real.default, aten.view_as_real_copy.default)
def view_as_real(x):
    """`out[i, 0] = real(x[i])`, `out[i, 1] = imag(x[i])`"""
    yield (P,), P
    for d in range(x.ndim):
        yield (S(d),), S(d)


@rule(aten.view_as_complex.default, aten.view_as_complex_copy.default)
def view_as_complex(x):
    """`out[i] = x[i, 0] + 1j * x[i, 1]`"""
    yield (P,), P
    for d in range(x.ndim - 1):
        yield (S(d),), S(d)


def _bits(at, x, dtype):
    if 0 in at.outs[0].shape:
        return x.new_zeros(at.outs[0].shape, dtype=dtype)
    return x.clone(memory_format=torch.contiguous_format).view(dtype)


@rule(aten.view.dtype, aten.view_copy.dtype, local=_bits)
def view_dtype(x, dtype):
    """`out[i, j, ...] = bits of x[i, j, ...]`: bits of a term say nothing of the sum"""
    last = x.ndim - 1
    for d in range(x.ndim):
        before, after = x.dtype.itemsize, dtype.itemsize
        if d < last or before == after:
            yield (S(d),), S(d)
        elif before > after:
            yield (U(d, 1),), U(d, before // after)
        else:
            yield (U(d, after // before),), U(d, 1)
