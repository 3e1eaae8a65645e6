"""Masks, flat places and unusual reductions as plain look-ups and writes at indices."""

from __future__ import annotations

from math import prod

import torch

from fdtensor.ops.decompositions.core import decomposition
from fdtensor.ops.decompositions.scan import placed_along

aten = torch.ops.aten

Tensor = torch.Tensor


def _spread(index: Tensor, shape) -> list[Tensor]:
    """The indices in each dim of places in the flat tensor."""
    index = torch.where(index < 0, index + prod(shape), index)
    steps = [prod(shape[d + 1 :]) for d in range(len(shape))]
    places = [index // step % n for step, n in zip(steps, shape, strict=True)]
    # one that is out of range stays so, for the op to refuse
    return [torch.where(index < 0, shape[0], index // steps[0]), *places[1:]]


@decomposition(aten.take.default)
def take(x, index):
    """`out[i] = x[index[i] // columns, index[i] % columns]`"""
    x = x if x.ndim else x.reshape(1)
    return aten.index.Tensor(x, _spread(index, x.shape))


@decomposition(aten.put.default)
def put(x, index, source, accumulate=False):
    """`out[index[i] // columns, index[i] % columns] = source[i]`, and `x` elsewhere"""
    target = x if x.ndim else x.reshape(1)
    source = source.reshape(index.shape)
    return target.index_put(_spread(index, target.shape), source, accumulate).reshape(x.shape)


def _order(mask: Tensor) -> Tensor:
    """The number of true elements before each, in the flat order, without joining any dims."""
    return _before(mask.to(torch.int64))


def _before(counts: Tensor) -> Tensor:
    """The sum of the counts before each, in the flat order."""
    within = counts.cumsum(-1) - counts
    return within + _before(counts.sum(-1)).unsqueeze(-1) if counts.ndim > 1 else within


@decomposition(aten.masked_scatter.default)
def masked_scatter(x, mask, source):
    """`out[i] = source[order[i]] if mask[i] else x[i]`"""
    x, mask = torch.broadcast_tensors(x, mask)
    if not source.numel():
        return x.clone()
    return torch.where(mask, source.reshape(-1)[_order(mask).clamp(max=source.numel() - 1)], x)


@decomposition(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad, mask, sizes):
    """`out[order[i]] = grad[i]` where `mask[i]`, and 0 elsewhere"""
    mask = mask.expand(grad.shape)
    if not prod(sizes):
        return grad.new_zeros(sizes)
    place = torch.where(mask, _order(mask), 0)
    zeros = grad.new_zeros(prod(sizes))
    return zeros.index_put([place], torch.where(mask, grad, 0), True).reshape(sizes)


@decomposition(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(x, indices, values, accumulate=False):
    """`out[i, j, k] = values[i, order[j], k] if mask[j] else x[i, j, k]`"""
    dims = [d for d, index in enumerate(indices) if index is not None]
    mask = indices[dims[0]]
    if len(dims) > 1 or mask.dtype != torch.bool:
        raise NotImplementedError
    after = x.ndim - dims[0] - mask.ndim
    at = values.ndim - after - 1  # the dim of the selected elements, if they have it
    if at >= 0 and values.shape[at] == 0:
        return x.clone()
    if at >= 0:
        order = torch.zeros_like(mask, dtype=torch.int64) if values.shape[at] == 1 else _order(mask)
        values = values[(slice(None),) * at + (order.clamp(max=values.shape[at] - 1),)]
    mask = mask.reshape((*mask.shape, *[1] * after))
    return torch.where(mask, values + x if accumulate else values, x)


def _touched(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """How many are written to each place."""
    none = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    return none.scatter_add(dim, index, torch.ones(index.shape, dtype=none.dtype, device=x.device))


START = {"sum": 0, "prod": 1, "amax": -torch.inf, "amin": torch.inf}
"""The neutral elements of reductions."""


@decomposition(aten.scatter_reduce.two)
def scatter_reduce(x, dim, index, src, reduce, *, include_self=True):
    """`out[k, j] = sum_i src[i, j] * (index[i, j] == k) / count[k, j]`; others from a start"""
    if (include_self and reduce != "mean") or not x.is_floating_point():
        raise NotImplementedError
    count = _touched(x, dim, index)
    if reduce == "mean":
        kept = x if include_self else torch.where(count > 0, 0.0, x)
        total = kept.scatter_add(dim, index, src)
        return total / (count + 1 if include_self else count.clamp(min=1))
    x = torch.where(count > 0, START[reduce], x)
    return x.scatter_reduce(dim, index, src, reduce)


@decomposition(aten.index_reduce.default)
def index_reduce(x, dim, index, source, reduce, *, include_self=True):
    """`scatter_reduce`, with an index for each element"""
    if not x.ndim:
        raise NotImplementedError
    dim %= x.ndim
    index = index.reshape([-1 if d == dim else 1 for d in range(x.ndim)]).expand(source.shape)
    return x.scatter_reduce(dim, index, source, reduce, include_self=include_self)


@decomposition(aten.embedding_renorm.default)
def embedding_renorm(x, indices, max_norm, norm_type):
    """`out[v] = x[v] * most / norm(x[v])` for rows that are looked up and longer than that"""
    norm = torch.linalg.vector_norm(x, norm_type, 1, True)
    seen = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    seen = seen.index_fill(0, indices.reshape(-1), True).unsqueeze(1)
    return torch.where(seen & (norm > max_norm), x * (max_norm / (norm + 1e-7)), x)


@decomposition(aten.nonzero_static.default)
def nonzero_static(x, *, size, fill_value=-1):
    """`out[order[i]] = i` where `x[i] != 0`, the first `size` of them"""
    if not x.ndim or not size:
        raise NotImplementedError
    hits, zeros = x != 0, torch.zeros(size, dtype=torch.int64, device=x.device)
    order = _order(hits)
    first = hits & (order < size)
    place = torch.where(first, order, 0)
    lines = [
        zeros.index_put([place], torch.where(first, placed_along(x, d), 0), True)
        for d in range(x.ndim)
    ]
    filled = torch.arange(size, device=x.device) < hits.sum()
    return torch.where(filled.unsqueeze(1), torch.stack(lines, 1), fill_value)


@decomposition(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats, *, output_size=None):
    """`out[j]` = how many of the repeats end at or before `j`"""
    if output_size is None:
        raise NotImplementedError
    places = torch.arange(output_size, device=repeats.device, dtype=repeats.dtype)
    return torch.searchsorted(repeats.cumsum(0), places, right=True).to(repeats.dtype)
