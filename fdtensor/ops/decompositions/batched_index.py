"""Indices under `vmap`, of which each entry has its own."""

from __future__ import annotations

import torch

from fdtensor.layouts.torch_private import is_batched
from fdtensor.ops.batched_index import added, copied, taken
from fdtensor.ops.decompositions.places import has_places, part_at, set_at
from fdtensor.ops.transparent import recorded_as
from fdtensor.ops.writes import checked_write

Tensor = torch.Tensor


@recorded_as(torch.Tensor.__getitem__)
def getitem(x, key):
    """`out[i, ...] = x[index[i], ...]`"""
    place = _place_of_index(key) if is_batched(x) else None
    if place is None and has_places(key):
        return part_at(x, key)
    if place is None:
        return checked_write(torch.Tensor.__getitem__, (x, key), {})  # a view may be written to
    dim, index = place
    flat = index if index.ndim == 1 else index.flatten()
    out = taken(_first(x, dim), flat, True)
    if index.ndim > 1:
        out = out.unflatten(0, index.shape)
    return out.movedim([*range(index.ndim)], [*range(dim, dim + index.ndim)]) if dim else out


@recorded_as(torch.Tensor.__setitem__)
def setitem(x, key, value):
    """`x[index[i], ...] = value[i, ...]`"""
    place = _place_of_index(key) if is_batched(x) else None
    if place is None and has_places(key):
        return set_at(x, key, value)
    if place is None or (isinstance(value, Tensor) and value.dtype != x.dtype):
        return checked_write(torch.Tensor.__setitem__, (x, key, value), {})
    dim, index = place
    shape = (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])
    source = torch.as_tensor(value, dtype=x.dtype, device=x.device).expand(shape)
    if index.ndim > 1:
        source, index = source.flatten(dim, dim + index.ndim - 1), index.flatten()
    new = _back(copied(_first(x, dim), index, _first(source, dim), True), dim)
    checked_write(torch.Tensor.copy_, (x, new), {})
    return None


def _first(x, dim):
    """The tensor with a dim as its first one."""
    return x.movedim(dim, 0) if dim else x


def _back(x, dim):
    return x.movedim(0, dim) if dim else x


def _place_of_index(key):
    """The dim and the index of a key that has one tensor of indices of its own, and else takes all.

    None for other keys.
    """
    keys = key if isinstance(key, tuple) else (key,)
    places = [k for k, entry in enumerate(keys) if not isinstance(entry, slice)]
    if len(places) != 1 or any(e != slice(None) for e in keys if isinstance(e, slice)):
        return None
    index = keys[places[0]]
    if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
        return None
    return (places[0], index) if index.ndim and is_batched(index) else None


def _is_own(x, index):
    """Whether the index of a dim of `x` is another one for each entry."""
    return x.ndim > 0 and index.ndim == 1 and is_batched(index)


@recorded_as(torch.index_select, torch.Tensor.index_select)
def index_select(input, dim, index):
    """`out[i, ...] = x[index[i], ...]`"""
    if not (_is_own(input, index) and is_batched(input)):
        return torch.index_select(input, dim, index)
    return _back(taken(_first(input, dim), index, False), dim)


@recorded_as(torch.index_add, torch.Tensor.index_add)
def index_add(input, dim, index, source, *, alpha=1):
    """`out[j, ...] = x[j, ...] + sum_i source[i, ...] * (index[i] == j)`"""
    if not _is_own(input, index):
        return torch.index_add(input, dim, index, source, alpha=alpha)
    source = source if alpha == 1 else alpha * source
    return _back(added(_first(input, dim), index, _first(source, dim), False), dim)


@recorded_as(torch.Tensor.index_add_)
def index_add_(input, dim, index, source, *, alpha=1):
    """The same in place."""
    if not _is_own(input, index):
        write = torch.Tensor.index_add_
        return checked_write(write, (input, dim, index, source), {"alpha": alpha})
    new = index_add(input, dim, index, source, alpha=alpha)
    return checked_write(torch.Tensor.copy_, (input, new), {})


@recorded_as(torch.index_copy, torch.Tensor.index_copy)
def index_copy(input, dim, index, source):
    """`out[index[i], ...] = source[i, ...]`, and `x` elsewhere"""
    if not _is_own(input, index):
        return torch.index_copy(input, dim, index, source)
    return _back(copied(_first(input, dim), index, _first(source, dim), False), dim)


@recorded_as(torch.Tensor.index_copy_)
def index_copy_(input, dim, index, source):
    """The same in place."""
    if not _is_own(input, index):
        return checked_write(torch.Tensor.index_copy_, (input, dim, index, source), {})
    new = index_copy(input, dim, index, source)
    return checked_write(torch.Tensor.copy_, (input, new), {})
