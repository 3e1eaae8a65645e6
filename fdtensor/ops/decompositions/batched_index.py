"""Indices and masks under `vmap`, of which each entry has its own."""

from __future__ import annotations

from inspect import signature

import numpy as np
import torch

from fdtensor.layouts.torch_private import is_batched
from fdtensor.ops.batched_index import added, copied, taken
from fdtensor.ops.decompositions.index import index_put as put_by_mask
from fdtensor.ops.decompositions.places import has_places, part_at, set_at
from fdtensor.ops.transparent import recorded_as
from fdtensor.ops.value_checks import require
from fdtensor.ops.writes import checked_write

Tensor = torch.Tensor


@recorded_as(torch.Tensor.__getitem__)
def getitem(x, key):
    """`out[i, ...] = x[j, i, ...]` for a number that a tensor says, or as torch has it"""
    if has_places(key):
        return part_at(x, key)
    return checked_write(torch.Tensor.__getitem__, (x, key), {})  # a view may be written to


@recorded_as(torch.Tensor.__setitem__)
def setitem(x, key, value):
    """`x[index[i], ...] = value[i, ...]`, or where `mask[i]`"""
    if has_places(key):
        return set_at(x, key, value, setitem)
    keys = key if isinstance(key, tuple) else (key,)
    own = any(isinstance(k, Tensor) and k.ndim and is_batched(k) for k in keys)
    is_cast = isinstance(value, Tensor) and value.dtype != x.dtype and any(map(_is_bool, keys))
    if not own or is_cast:
        return checked_write(torch.Tensor.__setitem__, (x, key, value), {})
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    first = next((d for d, size in enumerate(value.shape) if size != 1), value.ndim)
    value = value.reshape(value.shape[first:])  # torch takes any number of dims of 1 before
    view, indices = _sliced(x, keys)
    checked_write(torch.Tensor.copy_, (view, _put(view, indices, value, False)), {})
    return None


def _sliced(x, keys):
    """The view that all keys but tensors give, and for each dim of it the tensor or None."""
    keys = [_as_index(k, x) for k in keys]
    taken = sum(k.ndim if _is_bool(k) else not (k is None or _is_new(k)) for k in keys)
    filled = [slice(None)] * (x.ndim - taken + any(k is ... for k in keys))
    spread = []
    for k in keys if any(k is ... for k in keys) else (*keys, ...):
        spread += filled if k is ... else [k]
    basic, indices = [], []
    for k in spread:
        if isinstance(k, Tensor):
            basic += [slice(None)] * (k.ndim if _is_bool(k) else 1)
            indices.append(k)
        elif _is_new(k):
            basic.append(None)
            indices.append(torch.zeros(int(k), dtype=torch.int64, device=x.device))
        else:
            basic.append(k)
            indices += [None] if k is None or isinstance(k, slice) else []
    return x[tuple(basic)], indices


def _as_index(k, x):
    """An entry of an index, of which sequences are tensors."""
    if not isinstance(k, (list, tuple, range, np.ndarray)):
        return k
    index = torch.as_tensor(k, device=x.device)
    return index if index.numel() else index.to(torch.int64)


def _is_new(k):
    """Whether it stands for a dim of its own, in which it is an index."""
    return isinstance(k, (bool, np.bool_))


def _is_bool(k):
    return isinstance(k, Tensor) and k.dtype == torch.bool


def _put(x, indices, values, accumulate):
    """A tensor with values at indices, which are those of its first dims to torch.

    Its rule for `vmap` takes values in the wrong order where they are those of others.
    """
    at = [k for k, index in enumerate(indices) if index is not None]
    if _is_bool(indices[at[0]]) and len(at) == 1:
        _check_mask(x, indices[at[0]], at[0], values)
        return put_by_mask(x, [*indices[: at[0] + 1]], values, accumulate)
    tensors = [indices[k] for k in at]
    if at == [*range(len(at))] or any(map(_is_bool, tensors)):
        return torch.index_put(x, indices[: at[-1] + 1], values, accumulate)
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    rest = [n for k, n in enumerate(x.shape) if k not in at]
    first = at[0] if at == [*range(at[0], at[0] + len(at))] else 0
    front = [*range(len(at))]
    values = values.expand([*rest[:first], *shape, *rest[first:]])
    values = values.movedim([first + d for d, _ in enumerate(shape)], [*range(len(shape))])
    return torch.index_put(x.movedim(at, front), tensors, values, accumulate).movedim(front, at)


def _check_mask(x, mask, dim, values):
    """Refuses a mask of another shape, and values that are not as many as it takes."""
    if mask.shape != x.shape[dim : dim + mask.ndim]:
        raise IndexError(f"the mask {[*mask.shape]} at {dim} is none of a tensor {[*x.shape]}")
    at = values.ndim - (x.ndim - dim - mask.ndim) - 1  # the dim of the values, if they differ
    if at >= 0 and values.shape[at] != 1:
        count = values.shape[at]
        require(mask.sum() == count, f"values of index_put, as many as the mask takes: {count}")


@recorded_as(torch.index_put, torch.Tensor.index_put)
def index_put(input, indices, values, accumulate=False):
    """`out[index[i], ...] = values[i, ...]`, or that added to `x`, and `x` elsewhere"""
    if not any(i is not None and i.ndim and is_batched(i) for i in indices):
        return torch.index_put(input, indices, values, accumulate)
    return _put(input, [*indices], values, accumulate)


@recorded_as(torch.Tensor.index_put_)
def index_put_(input, indices, values, accumulate=False):
    """The same in place."""
    if not any(i is not None and i.ndim and is_batched(i) for i in indices):
        write = torch.Tensor.index_put_
        return checked_write(write, (input, indices, values, accumulate), {})
    new = index_put(input, indices, values, accumulate)
    return checked_write(torch.Tensor.copy_, (input, new), {})


def _first(x, dim):
    """The tensor with a dim as its first one."""
    return x.movedim(dim, 0) if dim else x


def _back(x, dim):
    return x.movedim(0, dim) if dim else x


def _is_own(x, index):
    """Whether the index of a dim of `x` is another one for each entry."""
    return x.ndim > 0 and index.ndim == 1 and is_batched(index)


@recorded_as(torch.index_select, torch.Tensor.index_select)
def index_select(input, dim, index):
    """`out[i, ...] = x[index[i], ...]`"""
    if not index.ndim and input.ndim:
        index = index.reshape(1)  # torch's rule would give each the entries of all
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


@recorded_as(torch.index_fill, torch.Tensor.index_fill)
def index_fill(input, dim, index, value):
    """`out[index[i], ...] = value`, and `x` elsewhere"""
    if not _is_own(input, index) or (isinstance(value, Tensor) and value.ndim):
        return torch.index_fill(input, dim, index, value)
    x = _first(input, dim)
    index = torch.where(index < 0, index + x.shape[0], index)
    value = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    return _back(copied(x, index, value.expand(*index.shape, *x.shape[1:]), False), dim)


@recorded_as(torch.Tensor.index_fill_)
def index_fill_(input, dim, index, value):
    """The same in place."""
    if not _is_own(input, index):
        return checked_write(torch.Tensor.index_fill_, (input, dim, index, value), {})
    return checked_write(torch.Tensor.copy_, (input, index_fill(input, dim, index, value)), {})


@recorded_as(torch.select_scatter, torch.Tensor.select_scatter)
def select_scatter(input, src, dim, index):
    """`out[..., index, ...] = src`, and `x` elsewhere: torch's own rule has another derivative"""
    if not (is_batched(input) or is_batched(src)):
        return torch.select_scatter(input, src, dim, index)
    input.select(dim, index)  # raises where there is no such entry
    first = index % input.shape[dim]
    return torch.slice_scatter(input, src.unsqueeze(dim), dim, first, first + 1)


@recorded_as(torch.nn.functional.embedding)
def embedding(
    input,
    weight,
    padding_idx=None,
    max_norm=None,
    norm_type=2.0,
    scale_grad_by_freq=False,
    sparse=False,
):
    """`out[i, f] = weight[input[i], f]`; row `padding_idx` has no gradient"""
    others = max_norm is not None or scale_grad_by_freq or sparse or input.dtype not in _NUMBERS
    rows = weight.shape[0] if weight.ndim == 2 else 0
    refused = not rows or not -rows <= (padding_idx or 0) < rows
    if others or refused or not (is_batched(weight) and is_batched(input)):
        rest = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        return torch.nn.functional.embedding(input, weight, *rest)
    rows = taken(weight, input.flatten(), False)
    rows = rows.unflatten(0, input.shape) if input.ndim else rows.squeeze(0)
    if padding_idx is None:
        return rows
    padding = (input == padding_idx % len(weight)).unsqueeze(-1)
    return torch.where(padding, rows.detach(), rows)


@recorded_as(torch.nn.functional.embedding_bag)
def embedding_bag(input, weight, offsets=None, *args, **kwargs):
    """`out[b, f]` = the sum of `psw[b, i] * weight[input[b, i], f]`, its mean, or the maximum"""
    bound = signature(torch.nn.functional.embedding_bag).bind(input, weight, None, *args, **kwargs)
    bound.apply_defaults()
    named = bound.arguments
    others = ("max_norm", "scale_grad_by_freq", "sparse", "padding_idx")
    own = is_batched(weight) and is_batched(input) and _is_of_bags(**named)
    if offsets is not None or not own or any(named[name] not in (None, False) for name in others):
        return torch.nn.functional.embedding_bag(input, weight, offsets, *args, **kwargs)
    rows = embedding(input, weight)
    if named["per_sample_weights"] is not None:
        rows = rows * named["per_sample_weights"].unsqueeze(-1)
    if named["mode"] == "max":
        return rows.max(1).values  # of equal ones the first alone has a gradient
    return rows.sum(1) if named["mode"] == "sum" else rows.mean(1)


def _is_of_bags(input, weight, *, mode, per_sample_weights, **_):
    """Whether torch takes these operands, as bags of one size that are not empty."""
    fits = input.ndim == weight.ndim == 2 and weight.is_floating_point() and input.shape[1]
    if not fits or per_sample_weights is None:
        return fits and mode in ("sum", "mean", "max")
    like_input = per_sample_weights.shape == input.shape
    return mode == "sum" and like_input and per_sample_weights.dtype == weight.dtype


_NUMBERS = (torch.int64, torch.int32)
