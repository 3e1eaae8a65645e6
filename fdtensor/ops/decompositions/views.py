"""Ops that move elements, as reshapes, slices and joins, whose rules know the blocks."""

from __future__ import annotations

from math import prod

import torch

from fdtensor.ops.decompositions.core import decomposition

aten = torch.ops.aten


@decomposition(aten.repeat.default)
def repeat(x, repeats):
    """`out[k, i] = x[i]`, with `k` and `i` joined"""
    shape = [1] * (len(repeats) - x.ndim) + list(x.shape)
    pairs = [n for d in shape for n in (1, d)]
    wide = [n for k, d in zip(repeats, shape, strict=True) for n in (k, d)]
    return (
        x.reshape(pairs).expand(wide).reshape([k * d for k, d in zip(repeats, shape, strict=True)])
    )


@decomposition(aten.roll.default)
def roll(x, shifts, dims=()):
    """`out[i] = x[(i - shift) % n]` of the flat tensor"""
    flat, first = x.reshape(-1), -shifts[0] % max(1, x.numel())
    return torch.cat([flat[first:], flat[:first]]).reshape(x.shape)


@decomposition(aten.resize.default)
def resize(x, size, *, memory_format=None):
    """The flat tensor, cut off or with anything after it, in another shape"""
    return torch.nn.functional.pad(x.reshape(-1), [0, prod(size) - x.numel()]).reshape(size)


@decomposition(aten.resize_as.default)
def resize_as(x, the_template, *, memory_format=None):
    """`x` resized to the shape of another tensor"""
    return resize(x, the_template.shape)


@decomposition(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(x, size, stride, storage_offset=None):
    """`out[i, j] = x[offset + i * stride[0] + j * stride[1]]` of the flat tensor, by windows"""
    if 0 in size:
        return x.new_zeros(size)
    order = sorted(range(len(size)), key=lambda d: -stride[d])
    start, last = storage_offset or 0, sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    out = x.reshape(-1)[start : start + last + 1]
    for d in order:
        if stride[d] == 0:
            out = out.unsqueeze(-2).expand(*out.shape[:-1], size[d], out.shape[-1])
        elif size[d] == 1:
            out = out.unsqueeze(-2)
        else:
            last -= (size[d] - 1) * stride[d]
            out = out.unfold(-1, last + 1, stride[d])
    return out.squeeze(-1).permute([order.index(d) for d in range(len(size))])


@decomposition(aten.as_strided_scatter.default)
def as_strided_scatter(x, src, size, stride, storage_offset=None):
    """`out[offset + i * stride[0] + j * stride[1]] = src[i, j]` of the flat tensor, else `x`"""
    places = torch.arange(x.numel(), device=x.device)
    where = as_strided(places, size, stride, storage_offset).reshape(-1)
    return x.reshape(-1).index_copy(0, where, src.reshape(-1)).reshape(x.shape)


@decomposition(aten.select_scatter.default)
def select_scatter(x, src, dim, index):
    """`out[index, i] = src[i]` along dim 0, and `x` elsewhere"""
    index %= x.shape[dim]
    return aten.slice_scatter.default(x, src.unsqueeze(dim), dim, index, index + 1)


@decomposition(aten.diag_embed.default)
def diag_embed(x, offset=0, dim1=-2, dim2=-1):
    """`out[k, i, i + offset] = x[k, i]`, and 0 elsewhere"""
    ndim, (*shape, size) = x.ndim + 1, x.shape
    for d in sorted((dim1 % ndim, dim2 % ndim)):
        shape.insert(d, size + abs(offset))
    return aten.diagonal_backward.default(x, shape, offset, dim1, dim2)


@decomposition(aten.diagonal_scatter.default)
def diagonal_scatter(x, src, offset=0, dim1=0, dim2=1):
    """`out[i, i + offset, k] = src[k, i]`, and `x` elsewhere"""
    ones = torch.ones_like(src, dtype=torch.bool)
    on_line = aten.diagonal_backward.default(ones, x.shape, offset, dim1, dim2)
    return torch.where(on_line, aten.diagonal_backward.default(src, x.shape, offset, dim1, dim2), x)


@decomposition(aten._chunk_cat.default)
def chunk_cat(tensors, dim, num_chunks):
    """`out[k]` along dim 0 is block `k` of each tensor, flat, one after the other"""
    dim, blocks = dim % tensors[0].ndim, []
    for t in tensors:
        n, beside = t.shape[dim], [0, 0] * (t.ndim - 1 - dim)
        padded = torch.nn.functional.pad(t, [*beside, 0, -n % num_chunks])
        size = prod(padded.shape[dim:]) // num_chunks
        blocks.append(padded.reshape([*t.shape[:dim], num_chunks, size]))
    return torch.cat(blocks, dim + 1)


@decomposition(aten.block_diag.default)
def block_diag(tensors):
    """The tensors one after the other on the diagonal, and 0 elsewhere"""
    blocks = [t.reshape(1, -1) if t.ndim < 2 else t for t in tensors]
    total, before, rows = sum(b.shape[1] for b in blocks), 0, []
    for b in blocks:
        rows.append(torch.nn.functional.pad(b, [before, total - before - b.shape[1]]))
        before += b.shape[1]
    return torch.cat(rows)
