"""`LocalProgram`: what one rank runs, as lines of aten calls and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.torch_private import functional_collectives, has_schema, schema_of
from fdtensor.ops.graph import Full, Var
from fdtensor.ops.value_checks import BOUNDED
from fdtensor.plans.collectives import Step
from fdtensor.programs.eqn import Together
from fdtensor.runtime.operand_memory import BY_HAND, apart, from_start, in_rows

__all__ = [
    "AFTER",
    "BEFORE",
    "LOOPING",
    "Again",
    "Ask",
    "WAIT",
    "Begun",
    "Line",
    "LocalProgram",
    "Round",
    "constant",
    "ended",
    "of_ops",
    "owned",
    "roots",
    "unread",
    "values_in",
    "waiting_late",
]

aten = torch.ops.aten

WAIT = functional_collectives.wait_tensor.default

_MAY_SHARE = {aten.reshape.default, aten.contiguous.default, *BY_HAND, BOUNDED, WAIT}


@attrs.frozen(eq=False)
class Line:
    """One call on the blocks of a rank, or one step; values are numbered for the rank."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outs: tuple[Var | None, ...]
    eqn: int
    """The line of the program that it belongs to."""


BEFORE, AFTER = -2, -1
"""In place of the number of a line: what comes before the first one and after the last."""


@attrs.frozen(eq=False)
class LocalProgram:
    """The lines of a rank: `outs` from `inputs`, with what is read last at each line."""

    inputs: tuple[Var, ...]
    lines: tuple[Line, ...]
    outs: tuple[Var, ...]
    dead: tuple[tuple[Var, ...], ...]
    """The values that nobody reads after each line."""
    fulls: Mapping[Var, Full] = attrs.field(factory=dict)
    """The shapes and dtypes of inputs, and of what lines of ops give."""
    conditions: Mapping[int, tuple[tuple[Var, bool], ...]] = attrs.field(factory=dict)
    """Under which lines of the program run, by their numbers, where they do not always."""


@attrs.frozen(eq=False)
class Again:
    """The op of the line from which on those of a loop run again; it has no operands."""


@attrs.frozen(eq=False)
class Ask:
    """The op of the line at which a loop ends unless its predicate holds."""


@attrs.frozen(eq=False)
class Round:
    """The op of the last line of a loop: what is carried becomes what was computed for that."""

    def __call__(self, *after: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return after


LOOPING = (Again, Ask, Round)
"""The ops by which lines run more than once."""


def constant(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor: the op of a line that has it at hand."""
    return tensor


@attrs.frozen(eq=False)
class Begun:
    """The op of a line that begins an exchange; its result is what the line that ends it calls."""

    op: Step | Together


def ended(begun: Callable[[], Any]) -> Any:
    """The blocks after an exchange that was begun: the op of the line that ends it."""
    return begun()


def of_ops(line: Line) -> Line:
    """The line as a graph may have it: an op that does at least what is called by hand."""
    if line.op in (in_rows, apart):
        return attrs.evolve(line, op=aten.contiguous.default)
    if line.op is from_start:
        kept = ("memory_format", torch.contiguous_format)
        return attrs.evolve(line, op=aten.clone.default, kwargs=(kept,))
    return line


def waiting_late(lines: Sequence[Line]) -> list[Line]:
    """The lines with each wait, and what is done with what arrives, just before that is read."""
    late: dict[Var, list[Line]] = {}
    out: list[Line] = []

    def arrive(tail: list[Line]) -> None:
        for line in tail:
            for v in line.outs:
                late.pop(v, None)  # type: ignore[arg-type]
        first, *rest = tail
        if first.op is ended and out and out[-1].outs == first.args:  # nothing happens meanwhile
            begun = out.pop()
            first = attrs.evolve(begun, op=begun.op.op, outs=first.outs)
        out.extend((first, *rest))

    tail: list[Line] = []
    for line in lines:
        while late and isinstance(line.op, LOOPING):  # nothing is on its way there
            arrive(next(iter(late.values())))
        if tail and (line.eqn != tail[0].eqn or _sends(line)):
            tail = []
        for v in values_in((*line.args, *(v for _, v in line.kwargs))):
            if v in late and late[v] is not tail:
                arrive(late[v])
        if tail or line.op is WAIT or line.op is ended:
            tail.append(line)
            late.update((v, tail) for v in line.outs if v is not None)
        else:
            out.append(line)
    while late:
        arrive(next(iter(late.values())))
    return out


def _sends(line: Line) -> bool:
    """Whether a line starts a collective or an exchange."""
    op = line.op
    return isinstance(op, Begun) or (
        op is not WAIT and getattr(op, "namespace", None) == WAIT.namespace
    )


def owned(lines: list[Line], inputs: Any, outs: Any, new: Any) -> tuple[list[Line], Any]:
    """Copies the outputs that share memory with an input, a constant or another output."""
    root = roots(lines, inputs)
    taken = set(inputs)
    copied = []
    for v in outs:
        if root[v] in taken:
            copy = new()
            lines.append(Line(aten.clone.default, (v,), (), (copy,), AFTER))
            v = copy
        else:
            taken.add(root[v])
        copied.append(v)
    return lines, tuple(copied)


def roots(lines: Sequence[Line], inputs: Sequence[Var]) -> dict[Var, Var]:
    """For each value the one whose memory it may be in: itself, an operand, or some input."""
    root: dict[Var, Var] = {v: v for v in inputs}
    for line in lines:
        shares = line.op in _MAY_SHARE or _views(line.op)
        source = next((a for a in line.args if isinstance(a, Var)), None)
        for v in line.outs:
            if v is not None:
                root[v] = root[source] if shares and source is not None else v
        if line.op is constant:
            root.update((v, inputs[0] if inputs else v) for v in line.outs if v is not None)
    return root


def _views(op: Any) -> bool:
    if not has_schema(op):
        return False
    return any(r.alias_info is not None for r in schema_of(op).returns)


def unread(lines: list[Line], outs: Any) -> tuple[tuple[Var, ...], ...]:
    """The values that nobody reads after each line."""
    again = _read_again(lines)
    kept = {*outs, *again.get(len(lines), ())}
    dead: list[tuple[Var, ...]] = []
    for i, line in reversed([*enumerate(lines)]):
        gone = []
        operands = [*values_in(line.args), *values_in(tuple(v for _, v in line.kwargs))]
        operands += again.get(i, ())
        for v in (*operands, *(v for v in line.outs if v is not None)):
            if v not in kept:
                kept.add(v)
                gone.append(v)
        dead.append(tuple(gone))
    return tuple(reversed(dead))


def _read_again(lines: list[Line]) -> dict[int, list[Var]]:
    """What each loop carries, and reads of before it, by the line after it, which frees that."""
    starts: list[int] = []
    again: dict[int, list[Var]] = {}
    for i, line in enumerate(lines):
        if isinstance(line.op, Again):
            starts.append(i)
        elif isinstance(line.op, Round):
            some = lines[starts.pop() : i + 1]
            made = {v for line in some for v in line.outs}
            operands = [(*line.args, *(v for _, v in line.kwargs)) for line in some]
            read = dict.fromkeys(v for entry in operands for v in values_in(entry))
            carried = [v for v in line.outs if v is not None]
            again[i + 1] = [*(v for v in read if v not in made), *carried]
    return again


def values_in(tree: Any) -> list[Var]:
    """The values in the arguments of a line."""
    if isinstance(tree, Var):
        return [tree]
    return [v for entry in tree for v in values_in(entry)] if isinstance(tree, tuple) else []
