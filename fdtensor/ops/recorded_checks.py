"""`Checks`: all that must hold of the operands of a recorded function, as one call at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any
from weakref import ref

import torch

from fdtensor.layouts.callsite import user_place
from fdtensor.layouts.errors import IndexRangeError
from fdtensor.layouts.torch_private import packet_name, schema_of
from fdtensor.ops.functional import innermost
from fdtensor.ops.graph import Call, Var
from fdtensor.ops.loop_ops import LOOP_IN, LOOP_NEXT, LOOP_OUT, UNKNOWN
from fdtensor.ops.saved_values import phase
from fdtensor.ops.select import SELECT, zeros_beside
from fdtensor.ops.value_checks import (
    BOUNDED,
    CHECK,
    REQUIRE,
    Bounds,
    bounds_of,
    fault_text,
    range_text,
)

__all__ = ["REQUIREMENTS", "Checks"]

aten = torch.ops.aten

REQUIREMENTS = {
    REQUIRE: lambda holds, fault: (~holds, fault),
    aten._linalg_check_errors.default: lambda info, name: (info != 0, f"matrix of {name}, regular"),
    aten._assert_async.default: lambda holds: (holds == 0, "assertion"),
    aten._assert_async.msg: lambda holds, text: (holds == 0, f"assertion: {text}"),
}
"""Ops that only raise: where their operands are at fault, and the text of the fault."""


class Checks:
    """The counts of faults of a function that is recorded, 0-d and float32, with their texts."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = ref(recorder)  # which has these: what it closes over is freed at once
        self.counts: dict[bool, list[tuple[torch.Tensor, str]]] = {False: [], True: []}
        """The counts of a forward, and of a backward, which may run later: by whether it is one."""
        self.bounded: dict[Any, torch.Tensor] = {}
        """Operands with entries in range, by value and range: a backward reads the forward's."""
        self.conditional: set[Any] = set()
        """Those of them whose faults count under a condition alone."""
        self.conditions: dict[int, list[torch.Tensor]] = {}
        """The conditions under which counts count, by the ids of the counts."""

    @property
    def recorder(self) -> Any:
        """The recorder that these are of."""
        return self._recorder()

    def within(self, op: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments of a call, its checked operand or operands with entries in range."""
        bounds = bounds_of(op)
        if bounds is None:
            return args, kwargs
        names = [a.name for a in schema_of(op).arguments]
        named = {a.name: a.default_value for a in schema_of(op).arguments}
        named |= {**dict(zip(names[: len(args)], args, strict=True)), **kwargs}
        self._count_masked(op, named)
        if not bounds.operand:
            return args, kwargs
        place = names.index(bounds.operand)
        operand = args[place]
        if isinstance(operand, (list, tuple)):
            known = named.get("counting", ())
            safe: Any = [
                t if t is None or k in known else self._safe(op, bounds, named, t, k)
                for k, t in enumerate(operand)
            ]
        else:
            safe = self._safe(op, bounds, named, operand, 0)
        return (*args[:place], safe, *args[place + 1 :]), kwargs

    def _safe(
        self, op: Any, bounds: Bounds, named: dict[str, Any], t: torch.Tensor, k: int
    ) -> torch.Tensor:
        whole = t.dtype in _INTEGERS
        if not t.numel() or whole != (bounds.kind == "index"):  # a mask is no index
            return t
        low, high = bounds.range(named, k)
        if high <= low:
            raise IndexRangeError(
                f"an index of {packet_name(op)} is in a dim without elements.",
                line=user_place() or "not known",
                hint="Leave such calls out where the dim is empty.",
            )
        if bounds.kind != "index" and self._is_filled(t, low, high):
            return t
        ignored = bounds.ignored(named)
        plain = self.recorder.plain
        key = (self.recorder.known(t), *plain((low, high, ignored)))
        if key not in self.bounded or (key in self.conditional and phase() < 0):
            self.conditional.discard(key)
            last = high - 1 if bounds.kind == "index" else high
            text = fault_text(range_text(op, bounds, plain(low), plain(last)), user_place())
            safe, count = self.recorder.recorded(BOUNDED, (t, low, high, ignored, text), {})
            self.bounded[key] = safe
            self._add(count, text)
        return self.bounded[key]

    def _is_filled(self, t: torch.Tensor, low: float, high: float) -> bool:
        """Whether all of a tensor is one number that is known and in the range."""
        v = self.recorder.known(t)
        call = next((call for call in reversed(self.recorder.calls) if v in call.outs), None)
        if call is None or call.op not in _FILLED:
            return False
        number = _FILLED[call.op](call.args)
        return isinstance(number, (int, float)) and low <= number <= high

    def _add(self, count: torch.Tensor, text: str) -> None:
        self.counts[phase() >= 0].append((count, text))

    def _count_masked(self, op: Any, named: dict[str, Any]) -> None:
        """Compares how many elements a mask selects with the number of values for them."""
        if op is aten.masked_scatter.default:
            x = named["self"]
            mask, count = named["mask"], named["source"].numel()
            told = self.recorder.plain(count)
            text = f"values of masked_scatter, no fewer than the mask takes: {told}"
            self._fails(lambda: mask.expand(x.shape).sum() > count, text)
        if op is aten.index_put.default:
            x = named["self"]
            masks = [(k, t) for k, t in enumerate(named["indices"]) if t is not None]
            if len(masks) != 1 or masks[0][1].dtype not in (torch.bool, torch.uint8):
                return
            ((k, mask),) = masks
            values, ndim = named["values"], x.ndim - mask.ndim + 1
            at = k - (ndim - values.ndim)
            if at >= 0 and values.shape[at] != 1:
                count = values.shape[at]
                told = self.recorder.plain(count)
                text = f"values of index_put, as many as the mask takes: {told}"
                self._fails(lambda: (mask != 0).sum() != count, text)

    @contextlib.contextmanager
    def where(self, holds: torch.Tensor) -> Generator[None]:
        """A context in which faults count where `holds` does, a tensor of the function."""
        counts, known = self.counts[False], {*self.bounded} - self.conditional
        start = len(counts)
        yield
        self.conditional |= {*self.bounded} - known
        condition = self.recorder.fake(innermost(holds))
        for count, _ in counts[start:]:
            self.conditions.setdefault(id(count), []).append(condition)

    @contextlib.contextmanager
    def within_loop(self, number: int, steps: int = UNKNOWN) -> Generator[Callable[..., None]]:
        """A context of a loop, which is given its predicate and tokens: its faults add up."""
        outside, known, conditional = self.counts, dict(self.bounded), set(self.conditional)
        self.counts = {False: [], True: []}

        def end(go: torch.Tensor, tokens: Sequence[torch.Tensor]) -> None:
            ready = list(tokens)
            every = [(key, *entry) for key, some in self.counts.items() for entry in some]
            ties: list[torch.Tensor] = []
            for _, count, _ in every:
                total, tie = LOOP_IN(zeros_beside(count), steps, number)
                ready.append(LOOP_NEXT(go, total + self._counting(count), tie, number))
                ties.append(tie)
            for (key, _, text), tie in zip(every, ties, strict=True):
                outside[key].append((innermost(LOOP_OUT(tie, ready, number)), text))

        try:
            yield end
        finally:
            self.counts, self.bounded, self.conditional = outside, known, conditional

    def required(self, op: Any, args: Sequence[Any]) -> None:
        """Counts the faults for which an op that only raises would raise."""
        with self.recorder:
            faults, text = REQUIREMENTS[op](*args)
        self._fails(lambda: faults, text)

    def _fails(self, faults: Any, text: str) -> None:
        text = fault_text(text, user_place())
        with self.recorder:
            count = faults().sum(dtype=torch.float32)
        self._add(count, text)

    def finish(self, outs: Sequence[Var]) -> None:
        """Records the calls that raise, one for the forward and one for backwards."""
        recorder = self.recorder
        floats = (recorder.types[v.index].dtype for v in outs)
        dtype = next((d for d in floats if d in _FLOATS), torch.float32)  # that of other sums
        for counts in filter(None, self.counts.values()):
            start = len(recorder.calls)
            conditions = [c for count, _ in counts for c in self.conditions.get(id(count), ())]
            with recorder:
                stacked = torch.stack([self._counting(count) for count, _ in counts]).to(dtype)
            read = [*(count for count, _ in counts), *conditions]
            self._move_up(start, set(map(recorder.known, read)))
            args = recorder.known(stacked), tuple(text for _, text in counts)
            recorder.calls.append(Call(CHECK, args, (), (), recorder.mark()))
            recorder.phases.append(-1)

    def _counting(self, count: torch.Tensor) -> torch.Tensor:
        """A count where its conditions hold, else zero."""
        for condition in self.conditions.get(id(count), ()):
            count = SELECT(condition.any(), count, zeros_beside(count))
        return count

    def _move_up(self, start: int, counts: set[Var]) -> None:
        """Moves the calls from `start` to after the last count: later reductions take it along."""
        calls, phases = self.recorder.calls, self.recorder.phases
        last = max(i for i, call in enumerate(calls[:start]) if counts.intersection(call.outs))
        for sequence in (calls, phases):
            moved = sequence[start:]
            del sequence[start:]
            sequence[last + 1 : last + 1] = moved


_FILLED: dict[Any, Callable[[Any], Any]] = {
    aten.full.default: lambda args: args[1],
    aten.full_like.default: lambda args: args[1],
    aten.ones.default: lambda _: 1,
    aten.ones_like.default: lambda _: 1,
}
"""Ops whose results have one number everywhere, as a function of the arguments."""

_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8}
_FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
