"""Maxima of windows, and values put back where the maxima were.

The ops act on the last `n` dims; a cut of any dim before those cuts all tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fdtensor.ops.notation.core import At, Halo, P, R, S, rule
from fdtensor.ops.notation.empty import unless_empty
from fdtensor.ops.notation.local_index import inside
from fdtensor.ops.notation.windows import Windows, adaptive, cut_dims, slides

aten = torch.ops.aten


def _best(x, where, d: int, windows: list[list[int]]):
    """The maxima of windows of dim `d`, and the entries of `where` at them."""
    width = max(map(len, windows))
    rows = [[*w, *[w[-1]] * (width - len(w))] for w in windows]
    index = torch.tensor(rows, device=x.device)
    x, where = (t.index_select(d, index.flatten()).unflatten(d, index.shape) for t in (x, where))
    values, best = x.max(d + 1, keepdim=True)
    return values.squeeze(d + 1), where.gather(d + 1, best).squeeze(d + 1)


def _maxima(op: Any, n: int, windows_of: Callable[..., list[Windows]]) -> None:
    def local(at: At, x, *args):
        block, out = at.ins[0], max(at.outs, key=lambda b: len(b.full))  # not one that is unread
        if not cut_dims(n, block, out) or 0 in x.shape:
            return unless_empty(op, torch.int64)(at, x, *args)
        where = torch.zeros([1] * n, dtype=torch.int64, device=x.device)
        for d in range(-n, 0):
            index = torch.arange(block.start[d], block.stop[d], device=x.device)
            where = where * block.full[d] + index.reshape(-1, *[1] * (-1 - d))
        where = where.expand(x.shape)
        for d, along in reversed([*enumerate(windows_of(block.full[-n:], *args), x.ndim - n)]):
            covered = [along.at(i) for i in range(out.start[d], out.stop[d])]
            low = block.start[d]
            inner = [[i - low for i in w if 0 <= i < along.size] for w in covered]
            x, where = _best(x, where, d, inner)
        return x, where

    @rule(op, local=local)
    def rows(x, *args):
        """`out[n, c, y], where[n, c, y] = max_x x[n, c, x]` for `x` in the window of `y`"""
        for d in range(x.ndim - n):
            yield (S(d),), (S(d), S(d))
        for d, along in enumerate(windows_of(x.shape[-n:], *args), x.ndim - n):
            if along.count > 1 and x.numel:
                yield (Halo(d, along.count, along.over),), (S(d), S(d))


def _put(op: Any, n: int, add: bool) -> Callable[..., Any]:
    """The local computation that puts values at their places in a plane, those in its block."""

    def local(at: At, x, *args):
        out, lead = at.outs[0], x.shape[:-n]
        if not cut_dims(n, *at.ins, out) or any(0 in block.shape for block in at.ins):
            return unless_empty(op)(at, x, *args)
        where = args[-1] if add else args[0]
        place, is_held, step = torch.zeros_like(where), torch.ones_like(where, dtype=torch.bool), 1
        for d in range(-1, -n - 1, -1):
            in_dim, index = inside(where % out.full[d], out.box[d])
            place, is_held = place + index * step, in_dim & is_held
            where, step = where // out.full[d], step * out.shape[d]
        place = torch.where(is_held, place, step)  # `step` is one after the last
        zeros = x.new_zeros([*lead, step + 1])
        put = zeros.scatter_add if add else zeros.scatter
        return put(-1, place.flatten(-n), x.flatten(-n))[..., :-1].reshape(out.shape)

    return local


def _maxima_backward(op: Any, n: int, windows_of: Callable[..., list[Windows]]) -> None:
    @rule(op, local=_put(op, n, add=True))
    def rows(grad, x, *args):
        """`out[n, c, x] = sum_y grad[n, c, y] * (where[n, c, y] == x)`"""
        for unread in (R, P):
            yield (P, unread, R), P
        for d in range(x.ndim - n):
            yield (S(d), S(d), S(d)), S(d)
        window_args = args[:-1] or (grad.shape[-n:],)
        for d, along in enumerate(windows_of(x.shape[-n:], *window_args), x.ndim - n):
            if along.size > 1 and grad.numel:
                needed = Halo(d, along.size, along.meeting)
                yield (needed, S(d), needed), S(d)


def _unpool(op: Any, n: int) -> None:
    @rule(op, local=_put(op, n, add=False))
    def rows(x, where, sizes, *_):
        """`out[n, c, where[n, c, y]] = x[n, c, y]`, and 0 elsewhere"""
        yield (P, R), P
        for d in range(x.ndim):
            yield (S(d), S(d)) if d < x.ndim - n else (R, R), S(d)


POOLS = {"max_pool{}d_with_indices": slides, "adaptive_max_pool{}d": adaptive}
"""The ops that give maxima and their places in the plane, with their windows."""

for n in (2, 3):
    for name, windows_of in POOLS.items():
        _maxima(getattr(aten, name.format(n)).default, n, windows_of)
        _maxima_backward(getattr(aten, f"{name.format(n)}_backward").default, n, windows_of)
    _unpool(getattr(aten, f"max_unpool{n}d").default, n)
