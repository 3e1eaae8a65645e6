"""The ops that a loop is written with, in a graph without circles.

What is carried comes in by `LOOP_IN`, is computed anew, and goes round by `LOOP_NEXT`, for as long
as the predicate of these holds; `LOOP_OUT` has what was carried then. A tie is a value that never
moves: by it what goes round has the layout of what came in. `ENTRY` and `WITH_ENTRY` read and write
one entry of a stack, of a number that only a step knows.
"""

from __future__ import annotations

import torch

from fdtensor.ops.own_ops import own_op

__all__ = [
    "ENTRY",
    "LOOP_IN",
    "LOOP_NEXT",
    "LOOP_OPS",
    "LOOP_OUT",
    "TIE",
    "UNKNOWN",
    "WITH_ENTRY",
    "loop_number",
    "loop_steps",
]

UNKNOWN = -1
"""In place of the number of steps of a loop that ends when values say so."""


def _in(x: torch.Tensor, _steps: int, _loop: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.clone(), x.clone()


def _next(_go: torch.Tensor, _next: torch.Tensor, tie: torch.Tensor, _loop: int) -> torch.Tensor:
    return torch.empty((), dtype=torch.bool, device=tie.device)


def _out(tie: torch.Tensor, _tokens: list[torch.Tensor], _loop: int) -> torch.Tensor:
    return tie.clone()


def _entry(stack: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return stack[int(i)]


def _entry_type(stack: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    del i
    return stack.new_empty(stack.shape[1:])


def _with_entry(stack: torch.Tensor, entry: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    stack[int(i)] = entry  # in its memory: what a loop carries is its own, and read once
    return stack


def _with_entry_type(stack: torch.Tensor, entry: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    del entry, i
    return torch.empty_like(stack)


LOOP_IN = own_op("loop_in(Tensor x, int steps, int loop) -> (Tensor, Tensor)", _in)
"""What is carried at first, and its tie."""

LOOP_NEXT = own_op("loop_next(Tensor go, Tensor next, Tensor tie, int loop) -> Tensor", _next)
"""A token, for what is carried into the next step where the predicate holds, and its tie."""

TIE = 2
"""The place of the tie among its operands."""

LOOP_OUT = own_op("loop_out(Tensor tie, Tensor[] tokens, int loop) -> Tensor", _out)
"""What is carried in the end, by its tie and the tokens of all that is carried in the loop."""

LOOP_OPS = (LOOP_IN, LOOP_NEXT, LOOP_OUT)


ENTRY = own_op("entry(Tensor stack, Tensor i) -> Tensor", _entry, _entry_type)
"""One entry of a stack, along its first dim."""

WITH_ENTRY = own_op(
    "with_entry(Tensor stack, Tensor entry, Tensor i) -> Tensor", _with_entry, _with_entry_type
)
"""A stack with another entry in one place; the stack from before is gone."""


def loop_number(args: tuple[object, ...]) -> object:
    """The number of the loop that a call of these is of, from its arguments."""
    return args[-1]


def loop_steps(args: tuple[object, ...]) -> int:
    """The number of steps of a loop, or `UNKNOWN`, from the arguments of its `LOOP_IN`."""
    steps = args[-2]
    assert isinstance(steps, int)
    return steps
