"""Ops that know rows from columns: triangles and diagonals."""

from __future__ import annotations

import torch

from fdtensor.rules.core import P, S, rule
from fdtensor.rules.held import positions

aten = torch.ops.aten


def _triangle(op):
    def local(at, x, diagonal=0):
        row, column = at.ins[0].start[-2:]
        return op(x, diagonal + row - column)

    return local


def _linear(x):
    yield (P,), P
    for d in range(x.ndim):
        yield (S(d),), S(d)


@rule(aten.tril.default, local=_triangle(aten.tril.default), contiguous=True)
def tril(x, diagonal=0):
    """`out[i, j] = x[i, j] if j - i <= diagonal else 0`"""
    yield from _linear(x)


@rule(aten.triu.default, local=_triangle(aten.triu.default), contiguous=True)
def triu(x, diagonal=0):
    """`out[i, j] = x[i, j] if j - i >= diagonal else 0`"""
    yield from _linear(x)


def _trace(at, x):
    row, column = at.ins[0].start
    return x.diagonal(row - column).sum()


@rule(aten.trace.default, local=_trace, contiguous=True)
def trace(x):
    """`out = sum_i x[i, i]`"""
    if x.dtype is not torch.bool:  # trace counts, but bools are pending as "or"
        yield (P,), P
    yield (S(0),), P
    yield (S(1),), P


def _rest(ndim: int, dim1: int, dim2: int) -> list[int]:
    """The other dims of a tensor of `ndim`."""
    return [d for d in range(ndim) if d not in (dim1 % ndim, dim2 % ndim)]


@rule(aten.diagonal.default)
def diagonal(x, offset=0, dim1=0, dim2=1):
    """`out[k, i] = x[i, i + offset, k]`, with `i` as the last dim"""
    yield (P,), P
    for to, d in enumerate(_rest(x.ndim, dim1, dim2)):
        yield (S(d),), S(to)


@rule(aten.diagonal_backward.default, sizes={"input_sizes": 0})
def diagonal_backward(grad, input_sizes, offset, dim1, dim2):
    """`out[i, i + offset, k] = grad[k, i]`, and 0 elsewhere"""
    yield (P,), P
    for of, d in enumerate(_rest(len(input_sizes), dim1, dim2)):
        yield (S(of),), S(d)


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(x, src, offset=0, dim1=0, dim2=1):
    """`out[i, i + offset, k] = src[k, i]`, and `x` elsewhere"""
    yield (P, P), P
    for of, d in enumerate(_rest(x.ndim, dim1, dim2)):
        yield (S(d), S(of)), S(d)


@rule(aten.diag_embed.default)
def diag_embed(x, offset=0, dim1=-2, dim2=-1):
    """`out[k, i, i + offset] = x[k, i]`, and 0 elsewhere"""
    yield (P,), P
    for of, d in enumerate(_rest(x.ndim + 1, dim1, dim2)):
        yield (S(of),), S(d)


def _eye(at, *_, dtype=None, layout=None, device=None, pin_memory=None):
    rows, columns = (positions(held, device) for held in at.outs[0].box)
    return (rows.unsqueeze(1) == columns).to(dtype or torch.get_default_dtype())


@rule(aten.eye.default, aten.eye.m, local=_eye)
def eye(n, m=None, **_):
    """`out[i, j] = 1 if i == j else 0`"""
    yield (), S(0)
    yield (), S(1)
