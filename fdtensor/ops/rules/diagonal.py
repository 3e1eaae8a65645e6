"""Ops that compare row and column indices: triangles and diagonals."""

from __future__ import annotations

import torch

from fdtensor.ops.notation.core import P, R, S, Window
from fdtensor.ops.notation.local_index import positions, subset
from fdtensor.ops.notation.ops import on
from fdtensor.ops.rules.views import placed

aten = torch.ops.aten


def _triangle(op):
    def local(at, x, diagonal=0):
        row, column = at.ins[0].start[-2:]
        return op(x, diagonal + row - column)

    return local


@on("tril triu", _triangle, contiguous=True)
def triangle(x, diagonal=0):
    """`out[i, j] = x[i, j]` where `j - i <= diagonal`, or `>=` it, else 0"""
    yield from placed(range(x.ndim))


def _trace(at, x):
    row, column = at.ins[0].start
    return x.diagonal(row - column).sum()


@on("trace", local=_trace, contiguous=True)
def trace(x):
    """`out = sum_i x[i, i]`"""
    if x.dtype is not torch.bool:  # trace counts, but bools are pending as "or"
        yield (P,), P
    yield (S(0),), P
    yield (S(1),), P


def _lines(shape, offset, dim1, dim2):
    """The placements of a tensor, each with those of its diagonal."""
    yield (P,), P
    ndim, count = len(shape), _count(shape, offset, dim1, dim2)
    starts = {dim1 % ndim: max(0, -offset), dim2 % ndim: max(0, offset)}
    for to, d in enumerate(d for d in range(ndim) if d not in starts):
        yield (S(d),), S(to)
    for d, start in starts.items():  # the part of the diagonal in each block
        yield (S(d),), Window(ndim - 2, shape[d], start, start + count)


def _count(shape, offset, dim1, dim2) -> int:
    """The number of entries of a diagonal."""
    return max(0, min(shape[dim1] + min(0, offset), shape[dim2] - max(0, offset)))


def _in_block(block, offset, dim1, dim2) -> tuple[int, tuple[int, int]]:
    """The offset of a diagonal in a block, and the range of its entries there."""
    row, column = block.start[dim1], block.start[dim2]
    local = offset + row - column
    first = row + max(0, -local) - max(0, -offset)
    return local, (first, first + _count(block.shape, local, dim1, dim2))


def _diagonal(at, x, offset=0, dim1=0, dim2=1):
    local, (first, last) = _in_block(at.ins[0], offset, dim1, dim2)
    out = at.outs[0]
    if first == last:
        return x.new_zeros(out.shape)
    line = aten.diagonal.default(x, local, dim1, dim2)
    beside = [first - out.start[-1], out.stop[-1] - last]
    return aten.constant_pad_nd.default(line, beside) if any(beside) else line


@on("diagonal diagonal_copy", local=_diagonal, contiguous=True)
def diagonal(x, offset=0, dim1=0, dim2=1):
    """`out[k, i] = x[i, i + offset, k]`, with `i` as the last dim"""
    yield from _lines(x.shape, offset, dim1, dim2)
    for d in (dim1, dim2):  # a rank has the entries of its block, others zeros
        yield (S(d % x.ndim),), P


def _diagonal_backward(at, grad, shape, offset, dim1, dim2):
    out = at.outs[0]
    local, (first, last) = _in_block(out, offset, dim1, dim2)
    if first == last:
        return grad.new_zeros(out.shape)
    line = subset(grad, -1, at.ins[0].box[-1], ((first, last),))
    return aten.diagonal_backward.default(line, out.shape, local, dim1, dim2)


@on("diagonal_backward", local=_diagonal_backward, contiguous=True)
def diagonal_backward(grad, input_sizes, offset, dim1, dim2):
    """`out[i, i + offset, k] = grad[k, i]`, and 0 elsewhere"""
    for (whole,), line in _lines(input_sizes, offset, dim1, dim2):
        yield (line,), whole
    for d in (dim1, dim2):
        yield (R,), S(d % len(input_sizes))


def _eye(at, *_, dtype=None, layout=None, device=None, pin_memory=None):
    rows, columns = (positions(held, device) for held in at.outs[0].box)
    return (rows.unsqueeze(1) == columns).to(dtype or torch.get_default_dtype())


@on("eye eye.m", local=_eye)
def eye(n, m=None, **_):
    """`out[i, j] = 1 if i == j else 0`"""
    yield (), S(0)
    yield (), S(1)
