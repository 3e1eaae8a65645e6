"""`work`: the seconds that a rank computes for a call, from the flops and bytes of its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log2
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fdtensor.layouts.placement import Cut
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.torch_private import packet_of
from fdtensor.ops.decompositions.grouped import GROUPED_MM, GROUPED_OUTER
from fdtensor.ops.decompositions.sort import BY_PLACE
from fdtensor.ops.graph import Call, Full, is_view
from fdtensor.ops.loop_ops import ENTRY, LOOP_OPS, WITH_ENTRY
from fdtensor.ops.rows import CallKey, arguments
from fdtensor.plans.cost import CostModel

__all__ = ["Part", "Work", "flops", "is_free", "work"]

IN_PLACE = {ENTRY, WITH_ENTRY, *LOOP_OPS}
"""Ops of loops, which read or write little of what they are given."""

PRODUCTS_OF_GROUPS = {GROUPED_MM, GROUPED_OUTER}

SORTS = {torch.ops.aten.sort.default, torch.ops.aten.sort.stable, BY_PLACE}


def passes(call: Call, types: Sequence[Full]) -> float:
    """How often a call reads its operands and writes its results: a sort merges `log2(n)` times."""
    if call.op not in SORTS:
        return 1.0
    x = types[call.ins[0].index]
    dims = [a for a in (*call.args[1:], dict(call.kwargs).get("dim")) if type(a) is int]
    return max(1.0, log2(max(x.shape[dims[0] if dims else -1], 1))) if x.ndim else 1.0


def is_free(call: Call) -> bool:
    """Whether a call is taken to cost nothing: a view, or an op of a loop."""
    return is_view(call) or call.op in IN_PLACE


def work(
    call: Call,
    types: Sequence[Full],
    ins: Sequence[tuple[Full, Any]],
    outs: Sequence[tuple[Full, Any]],
    count: int,
    share: float,
    cost: CostModel,
) -> float:
    """The seconds of a call on blocks of its operands and results, each with its placement.

    `share` is the part of its flops that other axes leave to a rank. A view takes none.
    """
    if is_free(call):
        return 0.0
    parts = [(full.nbytes, isinstance(p, Cut)) for full, p in (*ins, *outs)]
    moved = sum(nbytes / count if cut else nbytes for nbytes, cut in parts)
    split = share / count if any(cut for _, cut in parts) else share
    fulls = tuple(types[v.index] for v in call.ins)
    results = tuple(None if v is None else types[v.index] for v in call.outs)
    copied = moved * passes(call, types) / cost.copy
    return copied + _compute(call, fulls, results, cost) * split


Part = tuple[float, int]
"""The bytes of a rank's block of one operand or result, and a bit for each axis that cuts it."""


class Work:
    """What a rank computes for one call, whose operands have a placement on each axis."""

    def __init__(
        self, call: Call, types: Sequence[Full], sizes: Sequence[int], cost: CostModel
    ) -> None:
        self.types, self.sizes, self.cost = types, sizes, cost
        fulls = tuple(types[v.index] for v in call.ins)
        results = tuple(None if v is None else types[v.index] for v in call.outs)
        self.is_free = is_free(call)
        self.compute = _compute(call, fulls, results, cost)
        self.copy = cost.copy / passes(call, types)
        self._ranks = _ranks(tuple(sizes))

    def part(self, v: int | None, placements: Sequence[Any]) -> Part:
        """The part of an operand or result; of one that nobody reads the cuts alone."""
        ranks, mask = 1, 0
        for i, (n, p) in enumerate(zip(self.sizes, placements, strict=True)):
            if isinstance(p, Cut):
                ranks, mask = ranks * n, mask | 1 << i
        return (0.0 if v is None else self.types[v].nbytes / ranks), mask

    def parts(
        self, v: int | None, along: Sequence[Sequence[Any]]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The same for all combinations of a placement along each axis: a dim for each of these."""
        ranks, mask = np.ones([1] * len(along)), np.zeros([1] * len(along), dtype=np.int64)
        for i, (n, placements) in enumerate(zip(self.sizes, along, strict=True)):
            cut = np.reshape(
                [isinstance(p, Cut) for p in placements], (-1, *[1] * (len(along) - i - 1))
            )
            ranks, mask = ranks * np.where(cut, n, 1), mask | np.where(cut, 1 << i, 0)
        return (0.0 if v is None else self.types[v].nbytes) / ranks, mask

    def seconds(self, parts: Iterable[tuple[Any, Any]]) -> Any:
        """The seconds of the call, from the parts of its operands and results.

        Or those of many such calls, from arrays of such parts.
        """
        if self.is_free:
            return 0.0
        moved, mask = 0.0, 0
        for nbytes, cuts in parts:
            moved, mask = moved + nbytes, mask | cuts
        return moved / self.copy + self.compute / self._ranks[mask]


@remembered(64)
def _ranks(sizes: tuple[int, ...]) -> NDArray[np.int64]:
    """The number of ranks along the axes of each set of them: a bit for each axis."""
    ranks = np.ones(1, dtype=np.int64)
    for n in sizes:
        ranks = np.concatenate([ranks, ranks * n])
    return ranks


def _compute(
    call: Call, ins: tuple[Full, ...], outs: tuple[Full | None, ...], cost: CostModel
) -> float:
    """The seconds that one rank would take for the flops of a whole call."""
    return flops(CallKey.of(call), ins, outs) / cost.flops_of(ins[0].dtype) if ins else 0.0


@remembered(65536)
def flops(key: CallKey, ins: tuple[Full, ...], outs: tuple[Full | None, ...]) -> float:
    """The floating-point operations of a call, for products and convolutions; 0 for others."""
    from torch.utils.flop_counter import flop_registry

    if key.op in PRODUCTS_OF_GROUPS:
        return 2.0 * ins[0].numel * ins[1].shape[-1]
    formula = flop_registry.get(packet_of(key.op))
    if formula is None or not outs:
        return 0.0
    call = Call(key.op, key.args, key.kwargs, (None,) * key.width)
    args, _ = arguments(call, lambda v: ins[v.index].shape)
    args = args[: len(call.args)]
    shapes = tuple(None if o is None else o.shape for o in outs)
    try:
        return float(formula(*args, out_val=shapes[0] if len(shapes) == 1 else shapes))
    except (TypeError, ValueError, AssertionError, IndexError, AttributeError):
        return 2.0 * max(full.numel for full in ins)
