"""`Checks`: what must hold of the operands of a recorded function, as one call at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.layouts.callsite import user_place
from fdtensor.layouts.errors import IndexRangeError
from fdtensor.ops.graph import Call, Var
from fdtensor.ops.saved_values import phase
from fdtensor.ops.value_checks import (
    BOUNDED,
    CHECK,
    CHECKED,
    REQUIRE,
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
"""Ops that only raise: what must be false of their operands, and what is said where it is not."""


class Checks:
    """The counts of faults of a function that is recorded, 0-d and float32, with their texts."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.counts: dict[bool, list[tuple[torch.Tensor, str]]] = {False: [], True: []}
        """Those of a backward apart, which may run later."""
        self.bounded: dict[Any, torch.Tensor] = {}
        """Operands in their range, by value and range: the backward reads those of the forward."""

    def within(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments of a call with its operand, or each of a list, in its range."""
        bounds = CHECKED[op]
        names = [a.name for a in op._schema.arguments]
        given = {a.name: a.default_value for a in op._schema.arguments}
        given |= {**dict(zip(names[: len(args)], args, strict=True)), **kwargs}
        self._counted(op, given)
        if not bounds.operand:
            return args, kwargs
        place = names.index(bounds.operand)
        operand = args[place]
        if isinstance(operand, (list, tuple)):
            safe: Any = [
                t if t is None else self._safe(op, given, t, k) for k, t in enumerate(operand)
            ]
        else:
            safe = self._safe(op, given, operand, 0)
        return (*args[:place], safe, *args[place + 1 :]), kwargs

    def _safe(self, op: Any, given: dict[str, Any], t: torch.Tensor, k: int) -> torch.Tensor:
        bounds = CHECKED[op]
        whole = t.dtype in _INTEGERS
        if not t.numel() or whole != (bounds.kind == "index"):  # a mask is no index
            return t
        low, high = bounds.range(given, k)
        if high <= low:
            raise IndexRangeError(
                f"an index of {op._opname} is in a dim without elements.",
                line=user_place() or "not known",
                hint="Leave such calls out where the dim is empty.",
            )
        ignored = bounds.ignored(given)
        key = (self.recorder.known(t), low, high, ignored)
        if key not in self.bounded:
            text = fault_text(range_text(op, bounds, low, high), user_place())
            safe, count = self.recorder.recorded(BOUNDED, (t, low, high, ignored, text), {})
            self.bounded[key] = safe
            self._add(count, text)
        return self.bounded[key]

    def _add(self, count: torch.Tensor, text: str) -> None:
        self.counts[phase() >= 0].append((count, text))

    def _counted(self, op: Any, given: dict[str, Any]) -> None:
        """Compares how many elements a mask takes with how many there are for them."""
        if op is aten.masked_scatter.default:
            x = given["self"]
            mask, count = given["mask"], given["source"].numel()
            text = f"values of masked_scatter, no fewer than the mask takes: {count}"
            self._fails(lambda: mask.expand(x.shape).sum() > count, text)
        if op is aten.index_put.default:
            x = given["self"]
            masks = [(k, t) for k, t in enumerate(given["indices"]) if t is not None]
            if len(masks) != 1 or masks[0][1].dtype not in (torch.bool, torch.uint8):
                return
            ((k, mask),) = masks
            values, ndim = given["values"], x.ndim - mask.ndim + 1
            at = k - (ndim - values.ndim)
            if at >= 0 and values.shape[at] != 1:
                count = values.shape[at]
                text = f"values of index_put, as many as the mask takes: {count}"
                self._fails(lambda: (mask != 0).sum() != count, text)

    def required(self, op: Any, args: Sequence[Any]) -> None:
        """Counts where an op that only raises would."""
        with self.recorder:
            faults, what = REQUIREMENTS[op](*args)
        self._fails(lambda: faults, what)

    def _fails(self, faults: Any, what: str) -> None:
        text = fault_text(what, user_place())
        with self.recorder:
            count = faults().sum(dtype=torch.float32)
        self._add(count, text)

    def finish(self, outs: Sequence[Var]) -> None:
        """Records the calls that raise, if there is anything to check: forward, and backward."""
        recorder = self.recorder
        floats = (recorder.types[v.index].dtype for v in outs)
        dtype = next((d for d in floats if d in _FLOATS), torch.float32)  # that of other sums
        for counts in filter(None, self.counts.values()):
            start = len(recorder.calls)
            with recorder:
                stacked = torch.stack([count for count, _ in counts]).to(dtype)
            self._move_up(start, {recorder.known(count) for count, _ in counts})
            args = recorder.known(stacked), tuple(text for _, text in counts)
            recorder.calls.append(Call(CHECK, args, (), (), recorder.mark()))
            recorder.phases.append(-1)

    def _move_up(self, start: int, counts: set[Var]) -> None:
        """Puts the calls from `start` on after the last count: a later sum takes theirs along."""
        calls, phases = self.recorder.calls, self.recorder.phases
        last = max(i for i, call in enumerate(calls[:start]) if counts.intersection(call.outs))
        for some in (calls, phases):
            moved = some[start:]
            del some[start:]
            some[last + 1 : last + 1] = moved


_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8}
_FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
