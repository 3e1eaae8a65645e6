"""`lost_writes`: the writes to arguments on which nothing that a function returns depends."""

from __future__ import annotations

from collections.abc import Sequence

from fdtensor.layouts.torch_private import packet_name
from fdtensor.ops.graph import Call, Var

__all__ = ["lost_writes"]


def lost_writes(
    calls: Sequence[Call], inputs: Sequence[Var], ends: Sequence[Var], outs: Sequence[Var]
) -> dict[int, Call]:
    """The numbers of the inputs that were written to in vain, each with the call that did so last.

    `ends` are their values after all calls. The arguments of a function that is recorded never
    change: what was written is in what it returns, or nowhere.
    """
    written = {end: i for i, (v, end) in enumerate(zip(inputs, ends, strict=True)) if end != v}
    if not written:
        return {}
    needed, writers = {*outs}, {}
    for call in reversed(calls):
        results = [v for v in call.outs if v is not None]
        writers.update({written[v]: call for v in results if v in written})
        if not call.outs or not needed.isdisjoint(results):
            needed.update(() if _reads_types_alone(call) else call.ins)
    lost = sorted(i for end, i in written.items() if end not in needed and i in writers)
    return {i: writers[i] for i in lost}


def _reads_types_alone(call: Call) -> bool:
    """Whether a call, as that of `zeros_like` or `new_ones`, has its operands for their types."""
    name = packet_name(call.op)
    return name.startswith("new_") or name.endswith("_like")
