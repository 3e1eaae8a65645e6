"""`strategy`: what a program amounts to on each axis, in the words of parallel training."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import attrs
import torch

from fdtensor.layouts.placement import Cut
from fdtensor.ops.graph import Graph, Var, is_view
from fdtensor.programs.choices import Choice

if TYPE_CHECKING:
    from fdtensor.programs.assembly import Origin
    from fdtensor.programs.program import Program

__all__ = ["strategy"]


def strategy(program: Program) -> str:
    """Which axis cuts the data, the parameters or neither, in a line; "" where it is not known.

    Parameters that an axis cuts are gathered (fully sharded), or computed with as they are (tensor
    parallel), or neither, such as the state of an optimizer.
    """
    origin: Origin | None = program.origin
    if origin is None or not origin.constraints.parameters:
        return ""
    axes = [axis for axis, n in zip(program.mesh.axes, program.mesh.sizes, strict=True) if n > 1]
    told = [f"{_told(origin, origin.choices[axis])} over {axis}" for axis in axes]
    return f"strategy: {'; '.join(told)}" if told else ""


@attrs.frozen
class _Fates:
    """What becomes of inputs that an axis cuts: the numbers of those that are moved or used."""

    moved: frozenset[int]
    used: frozenset[int]


def _told(origin: Origin, choice: Choice) -> str:
    """What one axis does."""
    cut = {k for k, p in enumerate(choice.ins) if isinstance(p, Cut)}
    parameters = cut & origin.constraints.parameters
    data, fates = cut - parameters, _fates(origin.graph, choice)
    parts = [*_of_data(choice, data, fates), *_of_parameters(parameters, fates)]
    if parts == ["data parallel", "fully sharded"]:
        parts = ["fully sharded data parallel"]
    if not parts:
        anything = any(isinstance(p, Cut) for p in choice.placements.values())
        parts = ["computed in parts" if anything else "replicated"]
    return " and ".join(parts)


def _of_data(choice: Choice, data: Collection[int], fates: _Fates) -> Iterator[str]:
    dims = {p.dim for k in data if isinstance(p := choice.ins[k], Cut)}
    if data:
        gathered = fates.moved & set(data)
        name = "data parallel" if 0 in dims else "sequence parallel"
        yield f"{name}, {len(gathered)} of {len(data)} inputs moved" if gathered else name


def _of_parameters(parameters: Collection[int], fates: _Fates) -> Iterator[str]:
    moved, used = fates.moved & set(parameters), fates.used & set(parameters)
    if not parameters:
        return
    if not moved:
        yield "tensor parallel" if used else "sharded state"
    elif len(moved) < len(parameters):
        kind = "tensor parallel" if used - moved else "sharded state"
        yield f"{kind}, {len(moved)} of {len(parameters)} parameters gathered"
    else:
        yield "fully sharded"


def _fates(graph: Graph, choice: Choice) -> _Fates:
    """What becomes of the inputs, and of what is made of one alone, along an axis."""
    of = {v: k for k, v in enumerate(graph.inputs)}
    moved, used = set[int](), set[int]()
    for call, option in zip(graph.calls, choice.calls, strict=True):
        own = {of.get(v) for v in call.ins}
        alone = next(iter(own)) if len(own) == 1 else None
        simple = is_view(call) or torch.Tag.pointwise in call.op.tags
        for v, wanted in zip(call.ins, option.ins, strict=True):
            k, placed = of.get(v), choice.placements[v]
            if k is None or not isinstance(placed, Cut) or wanted == "free":
                continue
            if wanted != placed:
                moved.add(k)
            elif not simple:
                used.add(k)
        if alone is not None and simple:
            of |= dict.fromkeys(_made(call.outs), alone)
    return _Fates(frozenset(moved), frozenset(used))


def _made(outs: Collection[Var | None]) -> list[Var]:
    return [v for v in outs if v is not None]
