"""`apart`: a recorded function in which what waits for a backward is another value.

Where a value was marked, all that runs later than the marking, in a backward, reads a version of it
that is kept in the layout of the mark; what runs with it reads the value itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from fdtensor.ops.graph import Call, Full, Var, is_view, substituted

__all__ = ["ALIAS", "CONSTRAIN", "KEPT", "SAVED_AS", "apart", "phase"]

for _name in ("constrain", "saved_as", "kept"):
    torch.library.define(f"fdtensor::{_name}", "(Tensor x, str layout) -> Tensor")
    torch.library.impl(
        f"fdtensor::{_name}", "CompositeExplicitAutograd", lambda x, _layout: x.clone()
    )

CONSTRAIN = torch.ops.fdtensor.constrain.default
"""The identity, whose result has a layout."""

SAVED_AS = torch.ops.fdtensor.saved_as.default
"""The identity, which marks its operand; recorded functions do not have it."""

KEPT = torch.ops.fdtensor.kept.default
"""The identity of a value in a layout, of which backwards make whatever else they need."""


ALIAS = torch.ops.aten.alias.default
"""What KEPT is in a program: the recorder has no other use of it."""


def phase() -> int:
    """The backward that runs now, -1 for none."""
    return torch._C._current_graph_task_id()


@attrs.define(eq=False)
class _Mark:
    """A marked value in its layout, and the values that later phases read."""

    phase: int
    here: Var
    layout: str
    later: dict[int, Var] = attrs.field(factory=dict)


def apart(
    calls: Sequence[Call], phases: Sequence[int], outs: Sequence[Var], types: list[Full]
) -> tuple[tuple[Call, ...], tuple[Var, ...]]:
    """The calls and results without marks; `phases` says when each call was made.

    Views that were taken with the value are taken again of what is kept. New values are added to
    `types`.
    """
    if all(call.op is not SAVED_AS for call in calls):
        return tuple(calls), tuple(outs)
    made = _Apart(types)
    for call, now in zip(calls, phases, strict=True):
        made.add(call, now)
    return tuple(made.calls), tuple(made.names.get(v, v) for v in outs)


class _Apart:
    """The calls so far."""

    def __init__(self, types: list[Full]) -> None:
        self.types = types
        self.calls: list[Call] = []
        self.names: dict[Var, Var] = {}
        """What marked values were called before."""
        self.marks: dict[Var, _Mark] = {}
        self.views: dict[Var, tuple[Call, int]] = {}
        self.again: dict[tuple[Var, int], Var] = {}
        """Views, as views of what is kept."""

    def add(self, call: Call, now: int) -> None:
        args, kwargs = substituted((call.args, call.kwargs), lambda v: self.read(v, now))
        if call.op is SAVED_AS:
            (marked,), (made,) = call.ins, call.outs
            assert made is not None
            here = self.new(made)
            self.calls.append(Call(CONSTRAIN, args, (), (here,), call.mark))
            self.names[made] = args[0]
            self.marks[made] = self.marks[marked] = _Mark(now, here, args[1])
            return
        if is_view(call):
            self.views.update((v, (call, now)) for v in call.outs if v is not None)
        self.calls.append(attrs.evolve(call, args=args, kwargs=kwargs))

    def new(self, like: Var) -> Var:
        self.types.append(self.types[like.index])
        return Var(len(self.types) - 1)

    def read(self, v: Var, now: int) -> Var:
        """What a call of phase `now` reads for `v`."""
        mark = self.marks.get(v)
        if mark is not None and mark.phase != now:
            if now not in mark.later:
                mark.later[now] = self.new(v)
                self.calls.append(Call(KEPT, (mark.here, mark.layout), (), (mark.later[now],)))
            return mark.later[now]
        if mark is None and self.is_view_of_kept(v, now):
            if (v, now) not in self.again:
                call, _ = self.views[v]
                args, kwargs = substituted((call.args, call.kwargs), lambda u: self.read(u, now))
                made = self.again[v, now] = self.new(v)
                outs = tuple(made if u is v else None for u in call.outs)
                self.calls.append(Call(call.op, args, kwargs, outs, call.mark))
            return self.again[v, now]
        return self.names.get(v, v)

    def is_view_of_kept(self, v: Var, now: int) -> bool:
        """Whether `v` is a view, taken with a marked value, that is read later."""
        phases = set()
        while v in self.views and v not in self.marks:
            call, then = self.views[v]
            phases.add(then)
            (v,) = call.ins
        mark = self.marks.get(v)
        return mark is not None and now != mark.phase and phases == {mark.phase}
