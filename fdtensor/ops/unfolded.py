"""`unfolded`: the tensor whose windows are written to, of which torch tells the sizes alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import TraceError
from fdtensor.ops.graph import Call, Full, Var

__all__ = ["unfolded"]

aten = torch.ops.aten


class _Recorder(Protocol):
    types: list[Full]
    calls: list[Call]
    vars: dict[int, Var]
    alive: list[torch.Tensor]

    def plain(self, tree: Any) -> Any: ...


def unfolded(
    recorder: _Recorder, sizes: Sequence[Any], window: tuple[Any, ...]
) -> torch.Tensor | None:
    """The tensor of these sizes whose windows are written to, or None where there is none.

    Raises `TraceError` where several tensors have such windows, with gaps between: of these the one
    that is written to is not told.
    """
    bases = dict.fromkeys(
        call.ins[0]
        for call in recorder.calls
        if call.op is aten.unfold.default
        and call.args[1:] == window
        and recorder.types[call.ins[0].index].shape == recorder.plain(tuple(sizes))
    )
    if not bases:
        return None
    makers = {v: call for call in recorder.calls for v in call.outs}
    same: dict[Any, Var] = {}
    for v in bases:  # functionalization takes the same view again
        call = makers.get(v)
        same.setdefault(v if call is None else (call.op, repr(call.args), tuple(call.ins)), v)
    chain, gaps = list(same.values()), not _cover(sizes, *window)
    for before, after in itertools.pairwise(chain):
        if gaps and not _follows(makers, before, after):
            raise TraceError(
                "it cannot be told which tensor a write to the windows of `unfold` changes.",
                line=user_line() or "not known",
                hint="Write to slices of the tensor, or to a reshaped view of it.",
            )
    return next(t for t in reversed(recorder.alive) if recorder.vars.get(id(t)) == chain[-1])


def _cover(sizes: Sequence[Any], dim: int, size: int, step: int) -> bool:
    """Whether each entry is in some window."""
    if not sizes:
        return True
    return step <= size and bool((sizes[dim] - size) % step == 0)


def _above(makers: Mapping[Any, Call], v: Var) -> Iterator[Var]:
    """The value, and those it is computed from."""
    seen: set[Any] = {None}
    to_visit: list[Any] = [v]
    while to_visit:
        v = to_visit.pop()
        if v not in seen:
            seen.add(v)
            yield v
            to_visit += makers[v].ins if v in makers else ()


def _follows(makers: Mapping[Any, Call], before: Var, after: Var) -> bool:
    """Whether a value is that of the same tensor after a write to its windows."""
    above = [*_above(makers, after)]
    if before in above and _written_from(makers, before) is not None:
        return True
    return any(_written_from(makers, v) is before for v in above)


def _written_from(makers: Mapping[Any, Call], v: Var) -> Var | None:
    """What a write to windows has made the value of."""
    call = makers.get(v)
    spread = None if call is None or call.op is not aten.where.self else makers.get(call.ins[1])
    is_written = spread is not None and spread.op is aten.unfold_backward.default
    return call.ins[2] if call is not None and is_written else None
