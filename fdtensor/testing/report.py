"""`told`: a failed case in words."""

from __future__ import annotations

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.mesh import Mesh
from fdtensor.programs.program import Program
from fdtensor.tensors.calls.function import Spmd
from fdtensor.testing.case import Case
from fdtensor.testing.checker import CaseFailure
from fdtensor.testing.compare import Difference
from fdtensor.testing.layout_case import LayoutCase
from fdtensor.testing.strides import Strides

__all__ = ["told"]

_LINES = 24
"""Longer programs show their traffic only."""


def told(
    case: Case,
    setting: LayoutCase,
    problem: CaseFailure,
    *,
    rounding: bool,
    real: str | None = None,
    story: str = "",
) -> str:
    """The failure: the layouts, the facts, and what to do.

    `rounding` is whether it may be that alone, `real` what real ranks say, `story` how the layouts
    were found.
    """
    blocks = [f"{t}{_memory(s)}" for t, s in zip(setting.types, setting.strides, strict=True)]
    facts: dict[str, object] = dict(zip(case.where(), blocks, strict=True))
    facts["mesh"] = setting.mesh
    if isinstance(problem.cause, Difference):
        sentence = f"{case.name} gives something else {_where(setting.mesh)} than in one process."
        facts["differs"] = problem.cause
        if problem.cause.by:
            facts["by"] = problem.cause.by
    else:
        sentence = f"{case.name} raises {problem.kind} {_where(setting.mesh)}, not in one process."
        facts["raises"] = str(problem.cause).partition("\n")[0] or problem.kind
    if real is not None:
        facts["real ranks"] = real
    if story:
        facts["found as"] = story
    program = _program(case, setting)
    if program is not None:
        facts["program"] = program
    hint = _hint(case, problem, rounding)
    if real is None and setting.mesh.size > 1:
        hint += f" With ranks=GlooPool({max(setting.mesh.ranks) + 1}), real ranks run it too."
    return str(FdtensorError(sentence, hint=hint, **facts))


def _hint(case: Case, problem: CaseFailure, rounding: bool) -> str:
    if not isinstance(problem.cause, Difference):
        return "The error with its traceback is the cause of this one."
    if rounding:
        return (
            "With small integers for values it is right: where this is rounding, pass rtol and "
            "atol, or float64 tensors."
        )
    if isinstance(case.function(), Spmd):
        return "Where an op has a rule of yours, verify(op, samples) runs its rows."
    return "The function of DTensors that was passed as spread is to give what the plain one gives."


def _memory(strides: Strides | None) -> str:
    """How a tensor lies in memory, in words."""
    if strides is None:
        return ""
    order = f" with dims {', '.join(map(str, strides.order))} in memory" if strides.order else ""
    return order + (" and gaps between elements" if strides.gap > 1 else "")


def _where(mesh: Mesh) -> str:
    return f"on {mesh.size} ranks" if mesh.size > 1 else "on one rank"


def _program(case: Case, setting: LayoutCase) -> str | None:
    """The text of the program, or of its lines with traffic; None where there is none."""
    function = case.function()
    if not isinstance(function, Spmd):
        return None
    args, kwargs = case.arguments(setting.types, case.key)
    try:
        program: Program = function.trace(*args, **kwargs)
    except Exception:
        return None
    lines = str(program).splitlines()
    if len(lines) <= _LINES:
        return "\n".join(lines)
    loud = [line for line in lines[1:-1] if line.endswith("B") or "  no rule" in line]
    left = f"  ... {len(lines) - 2 - len(loud[:_LINES])} more lines"
    return "\n".join([lines[0], *loud[:_LINES], left, lines[-1]])
