"""`local_program`: what one rank runs for a program, as lines of aten calls and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch

from fdtensor.layouts.remembered import while_alive
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Full, Graph, Var, substituted
from fdtensor.ops.line_checks import LineCheck
from fdtensor.ops.loop_ops import (
    LOOP_IN,
    LOOP_NEXT,
    LOOP_OPS,
    LOOP_OUT,
    TIE,
    WITH_ENTRY,
    loop_number,
)
from fdtensor.ops.lowering import lowered, lowered_on_all
from fdtensor.plans.collectives import Exchange, Step
from fdtensor.programs.conditional import conditions
from fdtensor.programs.eqn import is_said, parts
from fdtensor.programs.loops import loops_of
from fdtensor.programs.program import Eqn, Program, Together
from fdtensor.runtime.lines import (
    BEFORE,
    WAIT,
    Again,
    Ask,
    Begun,
    Line,
    LocalProgram,
    Round,
    constant,
    ended,
    owned,
    unread,
    values_in,
    waiting_late,
)
from fdtensor.runtime.operand_memory import RESHAPES, brought_by, strict_operands

__all__ = ["Spelling", "local_program", "local_programs"]

aten = torch.ops.aten


@attrs.frozen
class Spelling:
    """How steps become lines: as functional collectives of a backend and local ops."""

    backend: str
    device: str
    exchanges: bool
    """Whether exchanges too: a Comm has better ways to run them."""
    lane: str = ""
    """The lane of its process groups."""


@while_alive(512)
def local_program(
    program: Program, rank: int, spelling: Spelling | None = None, checked: bool = False
) -> LocalProgram:
    """The lines that `rank`, of the program's mesh, runs; inputs first, then constants.

    Steps stay steps without a `spelling`. Where it is to be `checked`, each value is compared with
    its type.
    """
    return _Writer(program, rank, spelling, checked).written()


@while_alive(64)
def local_programs(program: Program, checked: bool = False) -> tuple[LocalProgram, ...]:
    """The lines of each rank, in the order of the mesh: one record for ranks that do the same."""
    ranks = program.mesh.order
    if checked:
        return tuple([local_program(program, rank, None, True) for rank in ranks])
    graphs = {
        number: lowered_on_all(eqn.call, *_types(program, eqn), program.mesh)
        for number, eqn in enumerate(program.eqns)
        if not eqn.steps and eqn.op not in LOOP_OPS
    }
    written: dict[tuple[int, ...], LocalProgram] = {}
    every: list[LocalProgram] = []
    for i, rank in enumerate(ranks):
        own = {number: on_all[i] for number, on_all in graphs.items()}
        key = tuple([id(graph) for graph in own.values()])
        if key not in written:
            written[key] = _Writer(program, rank, None, False, own).written()
        every.append(written[key])
    return tuple(every)


def _types(program: Program, eqn: Eqn) -> tuple[list[TensorType], list[TensorType | None]]:
    """The types of what a line reads and of what it gives."""
    outs = [None if v is None else program.type_of(v) for v in eqn.outs]
    return [program.type_of(v) for v in eqn.ins], outs


class _Writer:
    """The lines of a rank as they are written."""

    def __init__(
        self,
        program: Program,
        rank: int,
        spelling: Spelling | None,
        checked: bool,
        graphs: Mapping[int, Graph] = MappingProxyType({}),
    ) -> None:
        self.program, self.rank, self.spelling, self.checked = program, rank, spelling, checked
        self.graphs = graphs
        """What the rank does for lines, by their numbers, where that is known."""
        coord = program.mesh.coord(rank)
        assert coord is not None
        self.coord = coord
        self.device = "cpu" if spelling is None else spelling.device
        self.parts = parts(program.eqns)
        self.count = 0
        self.lines: list[Line] = []
        self.names: dict[Var, Var] = {}
        self.fulls: dict[Var, Full] = {}
        self.rounds: dict[Any, dict[Var, Var]] = {}
        """By loop, what is carried, with what was computed for the next step."""
        self.carried: set[Var] = set()
        stacks = [eqn.outs for eqn in program.eqns if eqn.op is WITH_ENTRY]
        self.written_to = frozenset(v for outs in stacks for v in outs)
        """Stacks with a new entry, in the memory of what was carried."""

    def new(self) -> Var:
        self.count += 1
        return Var(self.count - 1)

    def written(self) -> LocalProgram:
        program = self.program
        operands = (*program.inputs, *(v for v, _ in program.constants))
        inputs = tuple(self.new() for _ in operands)
        self.names.update(zip(operands, inputs, strict=True))
        self._check(operands, "an input", BEFORE)
        asked = {v for own in conditions(program).values() for v, _ in own}
        predicates = {v: self.names.get(v, v) for v in asked}
        asks = {loop.asks: loop for loop in loops_of(program)}
        for number, eqn in enumerate(program.eqns):
            if number in asks:
                self.lines.append(Line(Ask(), (self.names[asks[number].go],), (), (), number))
            if eqn.op in LOOP_OPS:
                self._loop_line(eqn, number)
            elif eqn.steps:
                self._step(eqn, number)
            else:
                graph = self.graphs.get(number) or self._lowered(eqn)
                self._graph(graph, eqn, number)
            if eqn.op is not LOOP_NEXT:  # a token is no tensor of a rank
                self._check(eqn.outs, str(eqn.op), number, contiguous=bool(eqn.steps))
            for v in eqn.outs:
                if v in predicates and v is not None:
                    predicates[v] = self.names[v]
        outs = tuple(self.names[v] for v in program.outs)
        lines, outs = owned(self.lines, inputs, outs, self.new)
        lines = waiting_late(lines)
        when = {
            i: tuple([(predicates[v], holds) for v, holds in own])
            for i, own in conditions(program).items()
        }
        for v, own in zip(program.inputs, inputs, strict=False):  # after which constants come
            type = program.type_of(v)
            self.fulls[own] = Full(type.local_shape(self.rank), type.dtype)
        return LocalProgram(inputs, tuple(lines), outs, unread(lines, outs), self.fulls, when)

    def _lowered(self, eqn: Eqn) -> Graph:
        return lowered(eqn.call, *_types(self.program, eqn), self.coord, self.device)

    def _loop_line(self, eqn: Eqn, number: int) -> None:
        """Lines for what comes into a loop, goes round in it, and comes out of it."""
        if eqn.op is LOOP_OUT:
            self.names[eqn.outs[0]] = self.names[eqn.ins[0]]  # type: ignore[index]
            return
        loop, following = loop_number(eqn.args), self.program.eqns[number + 1 : number + 2]
        is_last = not any(e.op is eqn.op and loop_number(e.args) == loop for e in following)
        block = self.names[eqn.ins[0 if eqn.op is LOOP_IN else 1]]
        in_place = eqn.op is LOOP_NEXT and eqn.ins[1] in self.written_to
        copy = block if in_place else self.new()
        if copy is not block:
            whole = (("memory_format", torch.contiguous_format),)
            self.lines.append(Line(aten.clone.default, (block,), whole, (copy,), number))
        if eqn.op is LOOP_IN:
            self.carried.add(copy)
            self.names.update((v, copy) for v in eqn.outs if v is not None)
            if is_last:
                self.lines.append(Line(Again(), (), (), (), number))
            return
        carried = self.names[eqn.ins[TIE]]
        assert carried in self.carried, "a tie is what its loop began with"
        self.rounds.setdefault(loop, {})[carried] = copy
        if is_last:
            pairs = self.rounds.pop(loop)
            self.lines.append(Line(Round(), tuple(pairs.values()), (), tuple(pairs), number))

    def _check(
        self, values: Sequence[Var | None], line: str, number: int, contiguous: bool = False
    ) -> None:
        for v in values if self.checked else ():
            if v is not None:
                type = self.program.type_of(v)
                check = LineCheck(self.program.name, line, type, self.rank, contiguous)
                self.lines.append(Line(check, (self.names[v],), (), (), number))

    def _step(self, eqn: Eqn, number: int) -> None:
        spelling, steps = self.spelling, eqn.steps
        exchange = isinstance(steps[0].collective, Exchange)
        if spelling is None or (exchange and not spelling.exchanges):
            ins, outs = tuple(self.names[v] for v in eqn.ins), tuple(self.new() for _ in steps)
            if spelling is None or not isinstance(eqn.op, (Step, Together)):
                self.lines.append(Line(eqn.op, ins, (), outs, number))
            else:
                begun = self.new()
                self.lines.append(Line(Begun(eqn.op), ins, (), (begun,), number))
                self.lines.append(Line(ended, (begun,), (), outs, number))
            self.names.update(zip(eqn.outs, outs, strict=True))  # type: ignore[arg-type]
            return
        if isinstance(eqn.op, Step) and is_said(eqn.op):
            self.names.update(zip(eqn.outs, [self.names[v] for v in eqn.ins], strict=True))  # type: ignore[arg-type]
            return
        from fdtensor.runtime.funcol_lowering import lower_steps

        graph = lower_steps(steps, self.rank, spelling.backend, spelling.device, spelling.lane)
        self._graph(graph, eqn, number, contiguous=eqn.is_collective)
        if steps[0].collective.is_part and number not in self.parts:
            self._copied(eqn.outs, number)

    def _copied(self, outs: Sequence[Var | None], number: int) -> None:
        """Copies of results, so that what they are views of is freed."""
        for v in outs:
            if v is not None:
                copy = self.new()
                self.lines.append(Line(aten.clone.default, (self.names[v],), (), (copy,), number))
                self.names[v] = copy

    def _contiguous(self, v: Var, number: int, op: Any = None) -> Var:
        """The value in contiguous memory, or as the op asks for it."""
        copied = self.new()
        self.lines.append(Line(brought_by(op), (v,), (), (copied,), number))
        return copied

    def _graph(self, graph: Graph, eqn: Eqn, number: int, contiguous: bool = False) -> None:
        """Lines for a graph from the inputs of an eqn to its outputs."""
        local = dict(zip(graph.inputs, (self.names[v] for v in eqn.ins), strict=True))
        if contiguous:  # a collective wants its operand so, and a graph is of contiguous blocks
            local = {v: self._contiguous(u, number) for v, u in local.items()}
        for v, tensor in graph.constants:
            local[v] = self.new()
            self.lines.append(Line(constant, (tensor,), (), (local[v],), number))
        views = {v for call in graph.calls if call.op in RESHAPES for v in call.outs}
        for call in graph.calls:
            args, kwargs = substituted((call.args, call.kwargs), local.__getitem__)
            strict = strict_operands(call.op)
            if call.op.namespace == WAIT.namespace and not views.isdisjoint(call.ins):
                strict = (0,)  # what was traced as a copy may be a view here
            if strict:
                wanted = [v for i, v in enumerate(call.ins) if i in strict]
                blocks = {local[v]: self._contiguous(local[v], number, call.op) for v in wanted}
                of = {v: v for v in values_in((*args, *(v for _, v in kwargs)))} | blocks
                args, kwargs = substituted((args, kwargs), of.__getitem__)
            outs = tuple(None if v is None else self.new() for v in call.outs)
            pairs = zip(call.outs, outs, strict=True)
            new = {v: m for v, m in pairs if v is not None and m is not None}
            local |= new
            self.fulls.update((m, graph.types[v.index]) for v, m in new.items())
            op = aten.reshape.default if call.op in RESHAPES else call.op
            self.lines.append(Line(op, args, kwargs, outs, number))
        read = [v for v in eqn.outs if v is not None]
        self.names.update(zip(read, (local[v] for v in graph.outs), strict=True))
