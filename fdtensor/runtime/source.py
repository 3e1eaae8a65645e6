"""`written`: the lines of one rank as the source of a Python function; `line_functions`: of many.

Lines that run under a condition stand in an `if` block; what they would give is None elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from math import isfinite
from types import CodeType
from typing import Any

import attrs
import torch
from torch.profiler import record_function

from fdtensor.layouts.remembered import while_alive
from fdtensor.layouts.torch_private import has_schema, schema_of
from fdtensor.ops.graph import Var, substituted, tensors_of
from fdtensor.ops.line_checks import LineCheck
from fdtensor.ops.loop_ops import WITH_ENTRY
from fdtensor.ops.select import SELECT
from fdtensor.plans.collectives import Step
from fdtensor.programs.program import Together
from fdtensor.runtime.fast_calls import fast, name_of_op
from fdtensor.runtime.lines import (
    LOOPING,
    Again,
    Ask,
    Begun,
    Line,
    LocalProgram,
    Round,
    constant,
    ended,
    values_in,
)
from fdtensor.runtime.reuse import reusing

__all__ = ["LineFunction", "line_functions", "selected", "written"]


def written(
    local: LocalProgram,
    comm: Any,
    groups: tuple[str, ...],
    labels: Sequence[str] = (),
    donated: frozenset[int] = frozenset(),
    reuses: bool = False,
    takes: bool = False,
) -> tuple[str, dict[str, Any]]:
    """The lines of a rank as the source of one function, and the names that it reads.

    It begins once all ranks of `groups`, in which its collectives are, are about to run theirs.
    With `labels`, one for each line of the program, a profiler sees which of them run. Where some
    inputs are `donated` it takes one list, which it empties, and drops them as it does results; it
    `takes` their memory for results too, where nobody else is in it. With `reuses` it does so with
    what it has computed.
    """
    names: dict[str, Any] = {"record_function": record_function} if labels else {}
    asked = {v for own in local.conditions.values() for v, _ in own}
    kept = {v for i, v in enumerate(local.inputs) if i not in donated}
    body = _beginning(local, comm, groups, asked, kept, names)
    program = _lines(local, reuses, donated if takes else frozenset())
    every = list(zip(program, local.dead, _depths(program), strict=True))
    for (condition, depth), some in groupby(
        every, lambda entry: (_condition(entry[0], local), entry[2])
    ):
        block = [(line, dead) for line, dead, _ in some]
        lines: list[str] = []
        for label, pairs in groupby(block, lambda pair: _label(pair[0], labels)):
            own = [t for pair in pairs for t in _spelled(*pair, kept, asked, names, comm)]
            seen = label and own
            lines += [f"    with record_function({label!r}):"] if seen else []
            lines += [f"    {line}" for line in own] if seen else own
        if condition:
            asks = [_holds(v) if holds else f"not {_holds(v)}" for v, holds in condition]
            nothing = " = ".join([*_made(block), "None"])
            lines = [f"    if {' and '.join(asks)}:", *(f"    {line}" for line in lines)]
            lines += ["    else:", f"        {nothing}"]
        body += ["    " * depth + line for line in lines]
    results = f"{_numbered(local.outs)}," if local.outs else ""
    parameters = "values" if donated else _numbered(local.inputs)
    return "\n".join([f"def program({parameters}):", *body, f"    return ({results})"]), names


def _beginning(
    local: LocalProgram,
    comm: Any,
    groups: tuple[str, ...],
    asked: set[Var],
    kept: set[Var],
    names: dict[str, Any],
) -> list[str]:
    """What comes before the lines of a rank: inputs out of their list, and other ranks met."""
    body: list[str] = []
    if len(kept) < len(local.inputs):
        body += [f"    ({_numbered(local.inputs)},) = values", "    values.clear()"]
    if groups:
        names |= {"unmet": comm.around.unmet, "meet": comm.around.meet, "groups": groups}
        body.append("    if unmet: meet(groups)")
    body += [f"    {_holds(v)} = bool(v{v.index})" for v in local.inputs if v in asked]
    return body + _unread(local, kept)


def _numbered(values: Sequence[Var]) -> str:
    return ", ".join(f"v{v.index}" for v in values)


def _lines(local: LocalProgram, reuses: bool, taken: frozenset[int]) -> Sequence[Line]:
    return reusing(local, taken) if reuses else local.lines


def _unread(local: LocalProgram, kept: set[Var]) -> list[str]:
    """The line that drops inputs which no line reads."""
    read = {v for dead in local.dead for v in dead}.union(local.outs)
    gone = [f"v{v.index}" for v in local.inputs if v not in read and v not in kept]
    return [f"    del {', '.join(gone)}"] if gone else []


@attrs.frozen(eq=False)
class LineFunction:
    """A line that many ranks run."""

    reads: tuple[Var, ...]
    call: Callable[..., Sequence[Any]]
    """A function of what is read, which gives the results."""
    overwrites: tuple[Var, ...]
    """What it writes to."""


@while_alive(256)
def line_functions(local: LocalProgram) -> tuple[LineFunction, ...]:
    """A function for each line, but for steps."""
    return tuple([_line_function(line) for line in local.lines])


def _line_function(line: Line) -> LineFunction:
    reads = tuple(dict.fromkeys(values_in((*line.args, *(v for _, v in line.kwargs)))))
    if isinstance(line.op, (Again, Ask, Step, Together)):
        return LineFunction(reads, tuple, ())
    own = {v: Var(i) for i, v in enumerate(reads)}  # so that lines that are alike are compiled once
    args, kwargs = (substituted(some, own.__getitem__) for some in (line.args, line.kwargs))
    names: dict[str, Any] = {}
    value = f"({_expression(attrs.evolve(line, args=args, kwargs=kwargs), names, None)},)"
    if _several(line.op):
        value = f"{_named(tensors_of, 'tensors_of', names)}{value}"
    exec(_code(f"def call({_numbered(tuple(own.values()))}):\n    return {value}"), names)
    # an op that writes to an operand says so to nobody else: programs have values, not memory
    return LineFunction(reads, names["call"], line.args[:1] if line.op is WITH_ENTRY else ())


@lru_cache(4096)
def _code(text: str) -> CodeType:
    return compile(text, "<fdtensor line>", "exec")


def _depths(lines: Sequence[Line]) -> Iterator[int]:
    """In how many loops each line is."""
    depth = 0
    for line in lines:
        yield depth
        depth += isinstance(line.op, Again) - isinstance(line.op, Round)


def _condition(line: Line, local: LocalProgram) -> tuple[tuple[Var, bool], ...]:
    """Under which predicates a line runs: those by which loops go on always do."""
    return () if isinstance(line.op, LOOPING) else local.conditions.get(line.eqn, ())


def _label(line: Line, labels: Sequence[str]) -> str:
    return labels[line.eqn] if labels and not isinstance(line.op, LOOPING) else ""


def _holds(v: Var) -> str:
    """The name of a predicate as a bool of Python."""
    return f"holds{v.index}"


def _made(block: Sequence[tuple[Line, tuple[Var, ...]]]) -> list[str]:
    """The names that lines leave behind, those of predicates too."""
    outs = [v for line, _ in block for v in line.outs if v is not None]
    gone = {v for _, dead in block for v in dead}
    return [*(f"v{v.index}" for v in outs if v not in gone), *map(_holds, outs)]


def _spelled(
    line: Line,
    dead: Sequence[Var],
    kept: set[Var],
    asked: set[Var],
    names: dict[str, Any],
    comm: Any,
) -> Iterator[str]:
    """A line as source, with the names that are dropped after it."""
    outs = ", ".join("_" if v is None else f"v{v.index}" for v in line.outs)
    value = _expression(line, names, comm)
    if len(line.outs) > 1 or _several(line.op):
        outs = f"({outs},)"
        if has_schema(line.op) and not _plain_tuple(line):
            value = f"{_named(tensors_of, 'tensors_of', names)}({value})"
    yield f"    {outs} = {value}" if outs else f"    {value}"
    for v in line.outs:
        if v in asked and v is not None:
            yield f"    {_holds(v)} = bool(v{v.index})"
    gone = [f"v{v.index}" for v in dead if v not in kept]
    gone += ["_"] if None in line.outs else []
    if gone:
        yield f"    del {', '.join(gone)}"


def selected(which: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
    """A copy of `a` where the predicate holds, else of `b`; the other one may be None."""
    chosen = a if bool(which) else b
    assert chosen is not None
    return chosen.clone(memory_format=torch.contiguous_format)


def _plain_tuple(line: Line) -> bool:
    """Whether an op returns just its tensors, without numbers or None among them."""
    kinds = [str(r.type) for r in schema_of(line.op).returns]
    return kinds == ["List[Tensor]"] or (set(kinds) == {"Tensor"} and len(kinds) == len(line.outs))


def _several(op: Any) -> bool:
    """Whether an op returns a list even of one tensor."""
    if not has_schema(op):
        return False
    returns = schema_of(op).returns
    return len(returns) > 1 or any(str(r.type) != "Tensor" for r in returns)


def _expression(line: Line, names: dict[str, Any], comm: Any) -> str:
    if isinstance(line.op, Together):
        steps = _named(line.op.steps, "steps", names)
        together = _named(comm.perform_together, "perform_together", names)
        return f"{together}({steps}, [{', '.join(f'v{v.index}' for v in line.args)}])"
    if isinstance(line.op, Step):
        step = _named(line.op, "step", names)
        return f"{_named(comm.perform, 'perform', names)}({step}, v{line.args[0].index})"
    if isinstance(line.op, Begun):
        return _begun(line, names, comm)
    if line.op is ended:
        return f"v{line.args[0].index}()"
    if isinstance(line.op, LineCheck):
        return f"{_named(line.op, 'check', names)}(v{line.args[0].index})"
    if isinstance(line.op, Again):
        return "while True:"
    if isinstance(line.op, Ask):
        return f"if not bool(v{line.args[0].index}): break"
    if isinstance(line.op, Round):
        return ", ".join(f"v{v.index}" for v in line.args)
    if line.op is constant:
        return _named(line.args[0], "constant", names)
    if line.op is SELECT:
        args = ", ".join(f"v{v.index}" for v in line.args)
        return f"{_named(selected, 'selected', names)}({args})"
    target = _named(fast(line.op), name_of_op(line.op), names)
    args = [_source(a, names) for a in line.args]
    args += [f"{k}={_source(v, names)}" for k, v in line.kwargs]
    return f"{target}({', '.join(args)})"


def _begun(line: Line, names: dict[str, Any], comm: Any) -> str:
    """The expression that begins an exchange."""
    op = line.op.op
    if isinstance(op, Together):
        steps, begin = _named(op.steps, "steps", names), _named(comm.begin_together, "begin", names)
        return f"{begin}({steps}, [{', '.join(f'v{v.index}' for v in line.args)}])"
    step, begin = _named(op, "step", names), _named(comm.begin, "begin", names)
    return f"{begin}({step}, v{line.args[0].index})"


def _named(value: Any, hint: str, names: dict[str, Any]) -> str:
    for name, known in names.items():
        if known is value:
            return name
    name = hint if hint not in names else f"{hint}_{len(names)}"
    names[name] = value
    return name


def _source(value: Any, names: dict[str, Any]) -> str:
    match value:
        case Var():
            return f"v{value.index}"
        case tuple():
            return f"[{', '.join(_source(v, names) for v in value)}]"
        case bool() | int() | str() | None:
            return repr(value)
        case float() if isfinite(value):
            return repr(value)
        case _:
            return _named(value, "value", names)
