"""Ops that make tensors from sizes alone: each rank makes its block."""

from __future__ import annotations

import torch

from fdtensor.ops.notation.core import P, R, S
from fdtensor.ops.notation.local_index import positions
from fdtensor.ops.notation.ops import on

aten = torch.ops.aten


def _strided(op):
    """A block has strides of its own."""
    return lambda at, *args, **kwargs: op(*args[:-2], at.outs[0].shape, **kwargs)


@on("full zeros ones empty.memory_format", sizes={"size": 0})
@on("empty_strided", lambda _op: _strided(aten.empty.memory_format))
def full(size, *_, **__):
    """`out[i] = c`, or anything"""
    for d in range(len(size)):
        yield (), S(d)


@on("ones_like zeros_like full_like empty_like")
def like(x, *_, **__):
    """`out[i] = c`, or anything"""
    yield (P,), R  # only the shape is read
    for d in range(x.ndim):
        yield (S(d),), S(d)


@on("new_zeros new_ones new_full new_empty", sizes={"size": 0})
@on("new_empty_strided", lambda _op: _strided(aten.new_empty.default))
def new(x, size, *_, **__):
    """`out[i] = c`, or anything"""
    for before in (R, P, *map(S, range(x.ndim))):  # only the dtype of x is read
        yield (before,), R
        for d, n in enumerate(size):
            if not isinstance(before, S) or (before == S(d) and x.shape[d] == n):
                yield (before,), S(d)


def _arange(at, *ends, dtype=None, layout=None, device=None, pin_memory=None):
    start, _, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
    if dtype is None:
        whole = all(isinstance(n, int) for n in ends)
        dtype = torch.int64 if whole else torch.get_default_dtype()
    places = positions(at.outs[0].box[0], device)
    if dtype.is_floating_point:
        return (places.to(torch.float64) * step + start).to(dtype)
    return (places * int(step) + int(start)).to(dtype)


@on("arange arange.start arange.start_step", local=_arange)
def arange(*_, **__):
    """`out[i] = start + i * step`"""
    yield (), S(0)


def _linspace(at, start, end, steps, *, dtype=None, layout=None, device=None, pin_memory=None):
    dtype = dtype or torch.get_default_dtype()
    places = positions(at.outs[0].box[0], device)
    if steps == 1:
        return torch.full_like(places, start, dtype=dtype)
    exact, step = places.to(torch.float64), (end - start) / (steps - 1)
    rising, falling = start + step * exact, end - step * (steps - 1 - exact)
    return torch.where(places < steps // 2, rising, falling).to(dtype)


@on("linspace", local=_linspace)
def linspace(start, end, steps, *, dtype=None, **_):
    """`out[i] = start + i * (end - start) / (steps - 1)`"""
    numbers = isinstance(start, (int, float)) and isinstance(end, (int, float))
    # of whole numbers torch rounds both ends first, and of complex ones each part
    if numbers and (dtype is None or dtype.is_floating_point):
        yield (), S(0)
