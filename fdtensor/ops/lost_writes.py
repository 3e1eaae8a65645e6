"""`lost_writes`: the writes to arguments on which nothing that a function returns depends."""

from __future__ import annotations

from collections.abc import Sequence

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
            needed.update(call.ins)
    lost = sorted(i for end, i in written.items() if end not in needed and i in writers)
    return {i: writers[i] for i in lost}
