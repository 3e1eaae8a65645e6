"""`value_named`: the value of a program that has a name in its text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdtensor.layouts.errors import TraceError
from fdtensor.ops.graph import Var

if TYPE_CHECKING:
    from fdtensor.programs.program import Program

__all__ = ["value_named"]


def value_named(program: Program, name: str) -> Var:
    """The value that `print(program)` shows by this name; raises `TraceError` where none is."""
    every = map(Var, range(len(program.types)))
    value = next((v for v in every if str(v) == name), None)
    if value is None:
        raise TraceError(
            f"{program.name} has no value {name!r}.",
            values=f"a to {Var(len(program.types) - 1)}",
            hint="Ask for a name that print(program) shows.",
        )
    return value
