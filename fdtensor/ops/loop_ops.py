"""The ops that a loop is written with, in a graph without circles.

What is carried comes in by `LOOP_IN`, is computed anew, and goes round by `LOOP_NEXT`, for as long
as the predicate of these holds; `LOOP_OUT` has what was carried then. A tie is a value that never
moves: by it what goes round has the layout of what came in.
"""

from __future__ import annotations

import torch

__all__ = ["LOOP_IN", "LOOP_NEXT", "LOOP_OPS", "LOOP_OUT", "TIE", "loop_number"]


def _in(x: torch.Tensor, _loop: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.clone(), x.clone()


def _next(_go: torch.Tensor, _next: torch.Tensor, tie: torch.Tensor, _loop: int) -> torch.Tensor:
    return torch.empty((), dtype=torch.bool, device=tie.device)


def _out(tie: torch.Tensor, _tokens: list[torch.Tensor], _loop: int) -> torch.Tensor:
    return tie.clone()


for _name, _text, _run in (
    ("loop_in", "(Tensor x, int loop) -> (Tensor, Tensor)", _in),
    ("loop_next", "(Tensor go, Tensor next, Tensor tie, int loop) -> Tensor", _next),
    ("loop_out", "(Tensor tie, Tensor[] tokens, int loop) -> Tensor", _out),
):
    torch.library.define(f"fdtensor::{_name}", _text)
    torch.library.impl(f"fdtensor::{_name}", "CompositeExplicitAutograd", _run)
    torch.library.register_fake(f"fdtensor::{_name}", _run)

LOOP_IN = torch.ops.fdtensor.loop_in.default
"""What is carried at first, and its tie."""

LOOP_NEXT = torch.ops.fdtensor.loop_next.default
"""A token, for what is carried into the next step where the predicate holds, and its tie."""

TIE = 2
"""The place of the tie among its operands."""

LOOP_OUT = torch.ops.fdtensor.loop_out.default
"""What is carried in the end, by its tie and the tokens of all that is carried in the loop."""

LOOP_OPS = (LOOP_IN, LOOP_NEXT, LOOP_OUT)


def loop_number(args: tuple[object, ...]) -> object:
    """The number of the loop that a call of these is of, from its arguments."""
    return args[-1]
