"""Ops that make tensors from sizes alone: each rank makes its block."""

from __future__ import annotations

import torch

from fdtensor.notation.core import P, R, S, rule
from fdtensor.notation.held import positions

aten = torch.ops.aten


@rule(
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    sizes={"size": 0},
)
def full(size, *_, **__):
    """`out[i] = c`"""
    for d in range(len(size)):
        yield (), S(d)


def _strided(at, size, stride, **kwargs):
    return aten.empty.memory_format(at.outs[0].shape, **kwargs)


@rule(aten.empty_strided.default, local=_strided)
def empty_strided(size, stride, **_):
    """`out[i]` is anything"""
    for d in range(len(size)):
        yield (), S(d)


@rule(
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.full_like.default,
    aten.empty_like.default,
)
def like(x, *_, **__):
    """`out[i] = c`"""
    yield (P,), R  # only the shape is read
    for d in range(x.ndim):
        yield (S(d),), S(d)


def _new(x, size):
    for before in (R, P, *map(S, range(x.ndim))):  # only the dtype of x is read
        yield (before,), R
        for d, n in enumerate(size):
            if not isinstance(before, S) or (before == S(d) and x.shape[d] == n):
                yield (before,), S(d)


@rule(
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    sizes={"size": 0},
)
def new(x, size, *_, **__):
    """`out[i] = c`"""
    yield from _new(x, size)


def _new_strided(at, x, size, stride, **kwargs):
    return aten.new_empty.default(x, at.outs[0].shape, **kwargs)


@rule(aten.new_empty_strided.default, local=_new_strided)
def new_empty_strided(x, size, stride, **_):
    """`out[i]` is anything"""
    yield from _new(x, size)


def _arange(at, *ends, dtype=None, layout=None, device=None, pin_memory=None):
    start, _, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
    places = positions(at.outs[0].box[0], device)
    if all(isinstance(n, int) for n in ends):
        return (places * step + start).to(dtype or torch.int64)
    if dtype is not None and not dtype.is_floating_point:
        start, step = int(start), int(step)
        return (places * step + start).to(dtype)
    exact = places.to(torch.float64) * step + start
    return exact.to(dtype or torch.get_default_dtype())


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step, local=_arange)
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


@rule(aten.linspace.default, local=_linspace)
def linspace(start, end, steps, *, dtype=None, **_):
    """`out[i] = start + i * (end - start) / (steps - 1)`"""
    numbers = isinstance(start, (int, float)) and isinstance(end, (int, float))
    if numbers and not (dtype is not None and dtype.is_complex):
        yield (), S(0)
