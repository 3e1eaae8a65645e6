"""`LOOKED_UP` and `PUT`: entries at indices of which some count the dim that they are for.

In `x[arange(n), j]` entry `i` of the first index is `i`, so that a block of rows needs that block
of `j` alone. What `vmap` makes of an index that is another one for each entry is such a call, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.ops.graph import Call, Full, Var
from fdtensor.ops.own_ops import own_op

__all__ = ["LOOKED_UP", "PUT", "along", "counting"]

aten = torch.ops.aten

Tensor = torch.Tensor


def _looked_up(x: Tensor, indices: list[Tensor | None], _counting: Sequence[int]) -> Tensor:
    return aten.index.Tensor(x, indices)


def _put(
    x: Tensor,
    indices: list[Tensor | None],
    values: Tensor,
    accumulate: bool,
    _counting: Sequence[int],
) -> Tensor:
    return aten.index_put.default(x, indices, values, accumulate)


LOOKED_UP = own_op("index(Tensor self, Tensor?[] indices, int[] counting) -> Tensor", _looked_up)
"""`x[indices]`, where the indices of the dims `counting` count these."""

PUT = own_op(
    "index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate, int[] counting)"
    " -> Tensor",
    _put,
)
"""`x` with values at such indices, or with them added."""


def along(index: Any) -> int:
    """The dim of an index, counted from its last, along which alone it has several entries."""
    several = [d - index.ndim for d, size in enumerate(index.shape) if size != 1]
    return several[0] if len(several) == 1 else 0


_COUNTS = {aten.arange.default, aten.arange.start, aten.arange.start_step}

_KEEPS = {
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
}
"""Ops that keep the order of elements where one dim alone has several."""


def counting(
    calls: Sequence[Call], types: Sequence[Full], x: Var, indices: Sequence[Var | None]
) -> tuple[int, ...]:
    """The dims of `x` whose index counts them, at most one for each dim of the result."""
    if any(v is not None and types[v.index].dtype not in _NUMBERS for v in indices):
        return ()
    places: dict[int, int] = {}
    for k, v in enumerate(indices):
        if v is not None:
            place, size = along(types[v.index]), types[x.index].shape[k]
            if place and types[v.index].shape[place] == size and _counts(calls, types, v):
                places.setdefault(place, k)
    return tuple(sorted(places.values()))


_NUMBERS = {torch.int64, torch.int32}


def _counts(calls: Sequence[Call], types: Sequence[Full], v: Var) -> bool:
    """Whether the entries of a value with one dim of several are 0, 1, 2 and so on."""
    for call in reversed(calls):
        if not any(out is v for out in call.outs):
            continue
        if call.op not in _KEEPS:
            return _from_zero(call)
        v = call.ins[0]
        if not along(types[v.index]):
            return False
    return False


def _from_zero(call: Call) -> bool:
    if call.op not in _COUNTS:
        return False
    start = 0 if call.op is aten.arange.default else call.args[0]
    step = call.args[2] if len(call.args) > 2 else 1
    return isinstance(start, int) and start == 0 and isinstance(step, int) and step == 1
