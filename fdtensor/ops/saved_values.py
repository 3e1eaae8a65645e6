"""`with_saved_values`: a recorded function in which backwards read saved versions of marked values.

A backward that runs later than the marking of a value reads a version of it that is saved in the
layout of the mark; calls of the same phase read the value itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.torch_private import current_graph_task
from fdtensor.ops.graph import Call, Full, Var, is_view, substituted
from fdtensor.ops.own_ops import own_op

__all__ = ["ALIAS", "CONSTRAIN", "SAVED", "SAVED_AS", "phase", "with_saved_values"]


def _identity(name: str) -> Any:
    return own_op(f"{name}(Tensor x, str layout) -> Tensor", lambda x, _layout: x.clone())


CONSTRAIN = _identity("constrain")
"""The identity, whose result has a layout."""

SAVED_AS = _identity("saved_as")
"""The identity, which marks its operand; recorded functions do not have it."""

SAVED = _identity("kept")
"""The identity of a value in a layout: backwards compute all other layouts from it."""

ALIAS = torch.ops.aten.alias.default
"""The op of a program in place of SAVED: recorded functions do not have it otherwise."""


def phase() -> int:
    """The number of the backward that is running, -1 for none."""
    return current_graph_task()


@attrs.define(eq=False)
class _Mark:
    """A marked value in its layout, and the saved values that later phases read."""

    phase: int
    value: Var
    layout: str
    saved: dict[int, Var] = attrs.field(factory=dict)
    """By the phase that reads it."""


def with_saved_values(
    calls: Sequence[Call], phases: Sequence[int], outs: Sequence[Var], types: list[Full]
) -> tuple[tuple[Call, ...], tuple[Var, ...]]:
    """The calls and results without marks; `phases` has the phase of each call.

    Views of the value from its own phase are taken again of the saved value. New values are added
    to `types`.
    """
    if all(call.op is not SAVED_AS for call in calls):
        return tuple(calls), tuple(outs)
    rewriter = _Rewriter(types)
    for call, phase in zip(calls, phases, strict=True):
        rewriter.add(call, phase)
    return tuple(rewriter.calls), tuple(rewriter.names.get(v, v) for v in outs)


class _Rewriter:
    """Replaces marks, call by call."""

    def __init__(self, types: list[Full]) -> None:
        self.types = types
        self.calls: list[Call] = []
        self.names: dict[Var, Var] = {}
        """The value that the result of a mark stands for."""
        self.marks: dict[Var, _Mark] = {}
        self.views: dict[Var, tuple[Call, int]] = {}
        self.views_of_saved: dict[tuple[Var, int], Var] = {}
        """By a view and the phase that reads it."""

    def add(self, call: Call, phase: int) -> None:
        """Adds a call of a phase, with the values that it reads then."""
        args, kwargs = substituted((call.args, call.kwargs), lambda v: self.read(v, phase))
        if call.op is SAVED_AS:
            (marked,), (out,) = call.ins, call.outs
            assert out is not None
            value = self.new(out)
            self.calls.append(Call(CONSTRAIN, args, (), (value,), call.mark))
            self.names[out] = args[0]
            self.marks[out] = self.marks[marked] = _Mark(phase, value, args[1])
            return
        if is_view(call):
            self.views.update((v, (call, phase)) for v in call.outs if v is not None)
        self.calls.append(attrs.evolve(call, args=args, kwargs=kwargs))

    def new(self, like: Var) -> Var:
        """A new value of the type of another."""
        self.types.append(self.types[like.index])
        return Var(len(self.types) - 1)

    def read(self, v: Var, phase: int) -> Var:
        """The value that a call of this phase reads for `v`."""
        mark = self.marks.get(v)
        if mark is not None and mark.phase != phase:
            if phase not in mark.saved:
                saved = mark.saved[phase] = self.new(v)
                self.calls.append(Call(SAVED, (mark.value, mark.layout), (), (saved,)))
            return mark.saved[phase]
        if mark is None and self.is_view_of_saved(v, phase):
            if (v, phase) not in self.views_of_saved:
                call, _ = self.views[v]
                args, kwargs = substituted((call.args, call.kwargs), lambda u: self.read(u, phase))
                view = self.views_of_saved[v, phase] = self.new(v)
                outs = tuple(view if u is v else None for u in call.outs)
                self.calls.append(Call(call.op, args, kwargs, outs, call.mark))
            return self.views_of_saved[v, phase]
        return self.names.get(v, v)

    def is_view_of_saved(self, v: Var, phase: int) -> bool:
        """Whether `v` is a view, from the phase of a marked value, that a later phase reads."""
        phases = set()
        while v in self.views and v not in self.marks:
            call, of_view = self.views[v]
            phases.add(of_view)
            (v,) = call.ins
        mark = self.marks.get(v)
        return mark is not None and phase != mark.phase and phases == {mark.phase}
