"""`work`: the seconds that a rank computes for a call, from the flops and bytes of its blocks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

from fdtensor.layouts.placement import Cut
from fdtensor.layouts.torch_private import packet_of
from fdtensor.ops.decompositions.grouped import GROUPED_MM, GROUPED_OUTER
from fdtensor.ops.graph import Call, Full, is_view
from fdtensor.ops.rows import CallKey, arguments
from fdtensor.plans.cost import CostModel

__all__ = ["flops", "work", "work_of_blocks"]

PRODUCTS_OF_GROUPS = {GROUPED_MM, GROUPED_OUTER}


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
    if is_view(call):
        return 0.0
    parts = [(full.nbytes, isinstance(p, Cut)) for full, p in (*ins, *outs)]
    moved = sum(nbytes / count if cut else nbytes for nbytes, cut in parts)
    split = share / count if any(cut for _, cut in parts) else share
    fulls = tuple(types[v.index] for v in call.ins)
    results = tuple(None if v is None else types[v.index] for v in call.outs)
    return moved / cost.copy + flops(CallKey.of(call), fulls, results) * split / cost.flops


def work_of_blocks(
    call: Call,
    types: Sequence[Full],
    ins: Sequence[Sequence[Any]],
    outs: Sequence[Sequence[Any]],
    sizes: Sequence[int],
    cost: CostModel,
) -> float:
    """The seconds of a call whose operands and results have a placement on each axis."""
    if is_view(call):
        return 0.0
    sides = [*zip(call.ins, ins, strict=True), *zip(call.outs, outs, strict=True)]
    moved, split = 0.0, [False] * len(sizes)
    for v, placements in sides:
        cuts = [isinstance(p, Cut) for p in placements]
        split = [a or b for a, b in zip(split, cuts, strict=True)]
        if v is not None:
            ranks = prod(n for n, cut in zip(sizes, cuts, strict=True) if cut)
            moved += types[v.index].nbytes / ranks
    fulls = tuple(types[v.index] for v in call.ins)
    results = tuple(None if v is None else types[v.index] for v in call.outs)
    ranks = prod(n for n, cut in zip(sizes, split, strict=True) if cut)
    return moved / cost.copy + flops(CallKey.of(call), fulls, results) / ranks / cost.flops


@functools.lru_cache(maxsize=65536)
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
