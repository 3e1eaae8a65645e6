"""`halves`: a program with its derivative, cut in two where cotangents come in."""

from __future__ import annotations

from fdtensor.programs.program import Program
from fdtensor.tensors.calls.phases import Cut, phases

__all__ = ["halves"]


def halves(whole: Program, inputs: int, outs: int) -> tuple[Program, Program, tuple[int, ...]]:
    """The lines that do not depend on cotangents, and the rest, and the inputs that these read."""
    primals = whole.inputs[:inputs]
    first = Cut("forward", primals, whole.outs[:outs])
    second = Cut("backward", whole.inputs[inputs:], whole.outs[outs:])
    forward, backward = phases(whole, [first, second])
    kept = tuple(i for i, v in enumerate(primals) if v in set(backward.takes))
    return forward.program, backward.program, kept
