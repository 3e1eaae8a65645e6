"""`with_kept_values` and `without_dead_carries`: what loops carry, after a function was recorded.

The derivative of a scan is recorded with the forward of each step in it. What a forward loop
computed alike need not be computed again: the values that the backward of a step reads are
written into stacks, unless the function says that they are to be recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from fdtensor.ops.graph import Call, Full, Var, is_view, substituted
from fdtensor.ops.loop_ops import (
    ENTRY,
    LOOP_IN,
    LOOP_NEXT,
    LOOP_OPS,
    LOOP_OUT,
    TIE,
    WITH_ENTRY,
    loop_number,
    loop_steps,
)

__all__ = ["with_kept_values", "without_dead_carries"]

Maker = Mapping[Var, Call]


def _makers(calls: Sequence[Call]) -> dict[Var, Call]:
    return {v: call for call in calls for v in call.outs if v is not None}


# --- what nobody reads ---------------------------------------------------------------------------


def without_dead_carries(calls: Sequence[Call], outs: Sequence[Var]) -> tuple[Call, ...]:
    """The calls that results need; what a loop carries for itself alone is left out."""
    if all(call.op is not LOOP_IN for call in calls):
        return tuple(calls)
    maker, next_of = _makers(calls), {c.ins[TIE]: c for c in calls if c.op is LOOP_NEXT}
    needed: set[Call] = set()
    waiting = [*(maker[v] for v in outs if v in maker), *(call for call in calls if not call.outs)]
    while waiting:
        call = waiting.pop()
        if call in needed:
            continue
        needed.add(call)
        read = call.ins[:1] if call.op is LOOP_OUT else call.ins
        waiting += [maker[v] for v in read if v in maker]
        if call.op is LOOP_IN:
            waiting += [next_of[v] for v in call.outs[1:] if v in next_of]
    tokens = {v for call in needed if call.op is LOOP_NEXT for v in call.outs}

    def of(call: Call) -> Call:
        if call.op is not LOOP_OUT:
            return call
        tie, every, number = call.args
        return attrs.evolve(call, args=(tie, tuple(v for v in every if v in tokens), number))

    return tuple([of(call) for call in calls if call in needed])


# --- what is computed again ----------------------------------------------------------------------


def with_kept_values(
    calls: Sequence[Call], phases: Sequence[int], types: list[Full], device: torch.device
) -> tuple[Sequence[Call], Sequence[int]]:
    """The calls, and the phases of each, in which backward loops read what forward ones computed.

    New values are added to `types`. What a later phase than that of its loop computes again, as
    `torch.utils.checkpoint` does, it goes on to compute.
    """
    starts = [i for i, call in enumerate(calls) if call.op is LOOP_IN]
    numbers = dict.fromkeys(loop_number(calls[i].args) for i in starts)
    if len(numbers) < 2:
        return calls, phases
    for number in numbers:
        keeper = _Keeper(calls, phases, types, device, number)
        calls, phases = keeper.kept()
    return calls, phases


@attrs.frozen(eq=False)
class _Stack:
    """A stack that a loop has written: one value of each of its steps."""

    loop: object
    value: Var
    at: Var
    """The index of its entry in a step."""
    steps: int


class _Keeper:
    """One loop, and what another one before it has computed alike."""

    def __init__(
        self,
        calls: Sequence[Call],
        phases: Sequence[int],
        types: list[Full],
        device: torch.device,
        number: object,
    ) -> None:
        self.calls, self.phases, self.types, self.device = calls, phases, types, device
        self.maker = _makers(calls)
        heads = [i for i, c in enumerate(calls) if c.op is LOOP_IN and self._is_of(c, number)]
        self.start, self.phase = heads[0], phases[heads[0]]
        self.steps = loop_steps(calls[heads[0]].args)
        self.own = self._in_steps_of(number)
        self.same: dict[Var, Var] = {}
        """The value of the other loop that is equal, in the step for the same entry."""
        self.before: tuple[object, ...] = ()
        """The number of the other loop, once it is known."""
        self.index: tuple[Var, ...] = ()
        """The index of entries in a step, once it is known."""
        self.inside: set[Var] = set()
        """The values that the steps of the other loop compute."""

    @staticmethod
    def _is_of(call: Call, number: object) -> bool:
        return call.op in LOOP_OPS and loop_number(call.args) == number

    def _in_steps_of(self, number: object) -> set[Var]:
        """The values that the steps of a loop compute."""
        inside: set[Var] = set()
        for call in self.calls:
            if self._is_of(call, number):
                inside.update(v for v in call.outs[:1] if v is not None and call.op is LOOP_IN)
            elif not inside.isdisjoint(call.ins):
                inside.update(v for v in call.outs if v is not None)
        return inside

    def kept(self) -> tuple[Sequence[Call], Sequence[int]]:
        """All calls, with reads of stacks in place of what is computed again."""
        stacks = self._stacks()
        reads = [c for c in self.calls[self.start :] if c.op is ENTRY and c.ins[0] in stacks]
        if all(c.ins[1] not in self.own for c in reads):  # as a forward loop
            return self.calls, self.phases
        known: dict[tuple[object, ...], Call] = {}
        for call in self.calls[: self.start]:
            twin = known.setdefault(self._key(call), call)
            if twin is not call and call.op not in LOOP_OPS:
                self._equal(call, twin)
        places: list[int] = []
        for i, call in enumerate(self.calls[self.start :], self.start):
            if call.op is ENTRY and call.ins[0] in stacks and self._reads(call, stacks):
                continue
            twin = known.get(self._key(call))
            counts = (
                call.op is not ENTRY and {*call.ins} & self.same.keys() == {*self.index} != set()
            )
            if call.op in LOOP_OPS or twin is None or counts or self.phases[i] != self.phase:
                places.append(i)
                continue
            self._equal(call, twin)
        if not self.before:
            return self.calls, self.phases
        wanted: dict[Var, None] = {}
        for i in places:
            for v in self.calls[i].ins:
                self._want(v, wanted)
        return self._rewritten(wanted)

    def _key(self, call: Call) -> tuple[object, ...]:
        """What two calls that compute the same have alike."""
        args, kwargs = substituted((call.args, call.kwargs), lambda v: self.same.get(v, v))
        return call.op, repr(args), repr(kwargs)

    def _equal(self, call: Call, twin: Call) -> None:
        """Notes that a call has the results of an earlier one."""
        pairs = zip(call.outs, twin.outs, strict=True)
        self.same |= {v: u for v, u in pairs if v is not None and u is not None}

    def _stacks(self) -> dict[Var, _Stack]:
        """The stacks that other loops have written, by the values that they are afterwards."""
        nexts = {c.ins[TIE]: c for c in self.calls[: self.start] if c.op is LOOP_NEXT}
        stacks: dict[Var, _Stack] = {}
        for call in self.calls[: self.start]:
            if call.op is not LOOP_OUT or call.ins[0] not in nexts:
                continue
            written = self.maker.get(nexts[call.ins[0]].ins[1])
            if written is None or written.op is not WITH_ENTRY:
                continue
            _, value, at = written.ins
            steps = loop_steps(self.maker[call.ins[0]].args)
            stacks |= {v: _Stack(loop_number(call.args), value, at, steps) for v in call.outs if v}
        return stacks

    def _reads(self, call: Call, stacks: Mapping[Var, _Stack]) -> bool:
        """Notes the value whose entry a call reads; False where it is of some other loop."""
        stack, i = stacks[call.ins[0]], call.ins[1]
        if i not in self.own or stack.steps != self.steps:
            return False
        if not self.before:
            self.before, self.index, self.same[i] = (stack.loop,), (i,), stack.at
            self.inside = self._in_steps_of(stack.loop)
        if (stack.loop, i, stack.at) != (*self.before, *self.index, self.same[i]):
            return False
        self.same |= {v: stack.value for v in call.outs if v is not None}
        return True

    def _want(self, v: Var, wanted: dict[Var, None]) -> None:
        """Adds the values to be read from stacks for `v`, if it is computed again."""
        if v not in self.same or v in wanted or v in self.index:
            return
        call = self.maker[v]
        if call.op is ENTRY:
            return
        if is_view(call) and self.same[v] in self.inside:
            self._want(call.ins[0], wanted)
            return
        wanted[v] = None

    def _rewritten(self, wanted: Mapping[Var, None]) -> tuple[Sequence[Call], Sequence[int]]:
        """All calls, with stacks for the values that are wanted."""
        loop = self.before[0]
        nexts = [c for c in self.calls if c.op is LOOP_NEXT and self._is_of(c, loop)]
        go, at = nexts[0].ins[0], self.same[self.index[0]]
        names: dict[Var, Var] = {}
        written: list[Call] = []
        stacks: dict[Var, Var] = {}
        """By a value, the tie of its stack."""
        tokens: list[Var] = []
        for v in wanted:
            value = self.same[v]
            if value not in self.inside:
                names[v] = value
            elif value not in stacks:
                calls, stacks[value], token = self._stacked(value, at, go, loop)
                written += calls
                tokens.append(token)
        out: list[tuple[Call, int]] = []
        kept: dict[Var, Var] = {}
        for call, phase in zip(self.calls, self.phases, strict=True):
            if call.op is LOOP_OUT and self._is_of(call, loop):
                out += [(c, phase) for c in written]
                written = []
                tie, every, number = call.args
                call = attrs.evolve(call, args=(tie, (*every, *tokens), number))
                if not kept:
                    tail = (call.args[1], number)
                    for value, tie in stacks.items():
                        kept[value] = self._new(self._stack_type(value))
                        out.append((Call(LOOP_OUT, (tie, *tail), (), (kept[value],)), phase))
            args, kwargs = substituted((call.args, call.kwargs), lambda v: names.get(v, v))
            out.append((attrs.evolve(call, args=args, kwargs=kwargs), phase))
            if self.index[0] in call.outs:
                for v in wanted:
                    if self.same[v] in kept:
                        names[v] = self._new(self.types[v.index])
                        read = kept[self.same[v]], self.index[0]
                        out.append((Call(ENTRY, read, (), (names[v],)), phase))
        return [c for c, _ in out], [p for _, p in out]

    def _stacked(self, value: Var, at: Var, go: Var, loop: object) -> tuple[list[Call], Var, Var]:
        """The calls that write a value of each step into a stack, its tie and its token."""
        full = self._stack_type(value)
        begin, carried, tie, after = [self._new(full) for _ in range(4)]
        token = self._new(Full((), torch.bool))
        kwargs = (("dtype", full.dtype), ("device", self.device), ("pin_memory", False))
        mark = self.maker[value].mark
        calls = [
            Call(torch.ops.aten.zeros.default, (full.shape,), kwargs, (begin,), mark),
            Call(LOOP_IN, (begin, self.steps, loop), (), (carried, tie), mark),
            Call(WITH_ENTRY, (carried, value, at), (), (after,), mark),
            Call(LOOP_NEXT, (go, after, tie, loop), (), (token,), mark),
        ]
        return calls, tie, token

    def _stack_type(self, value: Var) -> Full:
        full = self.types[value.index]
        return Full((self.steps, *full.shape), full.dtype)

    def _new(self, full: Full) -> Var:
        self.types.append(full)
        return Var(len(self.types) - 1)
