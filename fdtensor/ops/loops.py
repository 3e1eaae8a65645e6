"""`looped`: a function that runs again and again, for as long as another one says.

Both are recorded once. What they carry keeps its type; derivatives do not go through, since no
number of steps is known for which something could be kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.torch_private import maps_around
from fdtensor.ops.around import Around, smooth
from fdtensor.ops.branches import branches_count
from fdtensor.ops.call_recorder import CallRecorder
from fdtensor.ops.loop_ops import LOOP_IN, LOOP_NEXT, LOOP_OUT, UNKNOWN
from fdtensor.ops.randomness.draw import DRAW

__all__ = ["looped", "with_tensors"]


def looped(
    condition: Callable[..., Any],
    step: Callable[..., Any],
    carried: Sequence[Any],
    operands: Sequence[Any],
) -> tuple[torch.Tensor, ...]:
    """What is carried once the condition no longer holds of it."""
    if maps_around():
        raise _refused("while_loop stands inside of a vmap, whose entries may end apart.")
    recorder, first = CallRecorder.running[-1], with_tensors(carried, "while_loop")
    number, faults = len(recorder.calls), contextlib.nullcontext()
    for t in first:
        _refuse_derivative(t)
    pairs = [LOOP_IN(t, UNKNOWN, number) for t in first]
    if recorder.checks is not None:
        faults = recorder.checks.within_loop(number)
    with faults as end, _Loop() as around:
        carries = [around.note(carry) for carry, _ in pairs]
        go = _predicate(condition(*carries, *operands))
        after = step(*carries, *operands)
        after = with_tensors(after if isinstance(after, (tuple, list)) else [after], "while_loop")
        around.refuse_written()
        if any(call.op is DRAW and call.args[1] is not None for call in recorder.calls[number:]):
            raise _refused(
                "a while_loop draws random numbers, which would be the same in each step.",
                "Draw them before the loop, for as many steps as there may be, and index them.",
            )
        _refuse_different(first, after)
        tokens = [LOOP_NEXT(go, t, tie, number) for t, (_, tie) in zip(after, pairs, strict=True)]
        if end is not None:
            end(go, tokens)
    return tuple([LOOP_OUT(tie, tokens, number) for _, tie in pairs])


class _Loop(Around):
    """A context of what a loop runs: what it reads from around stays the same in all steps."""

    what = "a loop"

    def of(self, t: Any) -> Any:
        """The gate of a tensor from around; anything else as it is."""
        if isinstance(t, torch.Tensor) and id(t) not in self.inside:
            _refuse_derivative(t)
        return super().of(t)


def with_tensors(values: Sequence[Any], of: str) -> list[torch.Tensor]:
    """The values with tensors for numbers; raises `TraceError` for others, of this function."""
    device = next((t.device for t in values if isinstance(t, torch.Tensor)), None)
    return [
        t if isinstance(t, torch.Tensor) else torch.full((), t, dtype=_dtype(t, of), device=device)
        for t in values
    ]


def _dtype(number: Any, of: str) -> torch.dtype:
    kinds = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
    if type(number) not in kinds:
        raise _refused(f"{of} carries {number!r}, which is no tensor and no number.")
    return kinds[type(number)]


def _predicate(go: Any) -> torch.Tensor:
    """Whether another step is made: not in a branch that does not count."""
    if not isinstance(go, torch.Tensor) or go.numel() != 1:
        raise _refused(f"the condition of a while_loop gives {go!r}, and no tensor of one bool.")
    go = go if go.dtype == torch.bool else go != 0
    go = go.reshape(()) if go.ndim else go
    counts = branches_count()
    return go if counts is None else go & counts


def _refuse_derivative(t: torch.Tensor) -> None:
    if torch.is_grad_enabled() and smooth(t) and t.requires_grad:
        raise _refused(
            "a derivative is asked for of a while_loop, which has as many steps as values say.",
            "Take torch.scan, over as many steps as there may be; or detach() what it reads.",
        )


def _refuse_different(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> None:
    told = [", ".join(f"{tuple(t.shape)} {t.dtype}" for t in side) for side in (before, after)]
    if told[0] != told[1]:
        error = _refused("a step of a while_loop gives other types than it took.")
        error.facts |= {"took": told[0], "gave": told[1]}
        raise error


def _refused(sentence: str, hint: str = "") -> TraceError:
    return TraceError(
        sentence,
        line=user_line() or "not known",
        hint=hint
        or "What is carried is tensors and numbers, of the same types in every step; "
        "the condition gives one bool.",
    )
